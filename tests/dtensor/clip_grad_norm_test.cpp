// Clipping over several meshes equals clipping the whole gradients in one process.

#include "dtensor/clip_grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "base/error.h"
#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/dtensor/test_values.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

/// Parameters with gradients: whole ones, and the same as DTensors on {dp}, {dp, tp} and plain.
struct Model {
  std::vector<at::Tensor> whole, sharded;

  at::DeviceType device;

  explicit Model(const DeviceMesh& mesh, double scale = 1) : device(mesh.device_type()) {
    add({5, 3}, mesh["dp"], {Shard(0)}, scale);
    add({7}, mesh["dp"], {Shard(0)}, scale);
    add({1, 4}, mesh["dp"], {Shard(0)}, scale);  // empty on all ranks but one
    add({5, 7}, mesh, {Shard(0), Shard(1)}, scale);
    add({6, 4}, mesh, {Shard(0, 1), Shard(0)}, scale);
    add({3, 3}, mesh, {Replicate(), Shard(0)}, scale);
    add({4}, DeviceMesh(), {}, scale);
    whole.push_back(at::randn({2}, make_generator(99)).to(device));  // without gradient
    sharded.push_back(whole.back());
  }

  void add(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements, double scale) {
    const auto gradient = (at::randn(sizes, make_generator(whole.size())) * scale).to(device);
    whole.push_back(at::zeros_like(gradient));
    whole.back().mutable_grad() = gradient;
    const auto placed = [&](const at::Tensor& tensor) {
      return mesh.defined() ? distribute_tensor(tensor, mesh, placements) : tensor.clone();
    };
    sharded.push_back(placed(whole.back()));
    sharded.back().mutable_grad() = placed(gradient);
  }

  at::Tensor expected_norm(double p) const {
    std::vector<at::Tensor> flat;
    for (const auto& param : whole) {
      if (param.grad().defined()) flat.push_back(param.grad().flatten());
    }
    return at::linalg_vector_norm(at::cat(flat), p);
  }
};

DeviceMesh mesh_of(int world_size, c10::Device device = at::kCPU) {
  return init_device_mesh(device.type(), {world_size / 2, 2}, {"dp", "tp"});
}

void check_clipping(int world_size, double p, c10::Device device) {
  run_ranks(world_size, [&](int) {
    Model model(mesh_of(world_size, device));
    const auto expected = model.expected_norm(p);
    const auto norm = clip_grad_norm_(model.sharded, 0.5, {.norm_type = p});
    TESSERA_EXPECT(!is_dtensor(norm));
    expect_close(norm, expected, {.rtol = 1e-5, .atol = 1e-6});
    const auto factor = 0.5 / (expected + 1e-6);
    for (size_t i = 0; i < model.whole.size(); ++i) {
      const auto& gradient = model.sharded[i].grad();
      expect_equal(gradient.defined(), model.whole[i].grad().defined());
      if (gradient.defined()) {
        expect_close(is_dtensor(gradient) ? full_tensor(gradient) : gradient, model.whole[i].grad() * factor,
                     {.rtol = 1e-5, .atol = 1e-6});
      }
    }
  });
}

}  // namespace

TEST_CASE("clip_grad_norm_ over several meshes equals one process for every norm") {
  const int world_size = GENERATE(2, 4, 6);
  const double p = GENERATE(1.0, 2.0, 3.5, kInf);
  for (const auto device : test_devices()) {
    CAPTURE(world_size, p, device);
    check_clipping(world_size, p, device);
  }
}

TEST_CASE("gradients below the norm stay as they are, bit for bit") {
  run_ranks(4, [](int) {
    Model model(mesh_of(4));
    clip_grad_norm_(model.sharded, 1e6);
    for (size_t i = 0; i + 1 < model.whole.size(); ++i) {
      const auto& gradient = model.sharded[i].grad();
      expect_bit_equal(is_dtensor(gradient) ? full_tensor(gradient) : gradient, model.whole[i].grad());
    }
  });
}

TEST_CASE("a parameter that is listed twice counts once, and is scaled once") {
  run_ranks(4, [](int) {
    Model model(mesh_of(4));
    const auto expected = model.expected_norm(2);
    auto params = model.sharded;
    params.insert(params.end(), {params[0], params[3], params[6]});
    expect_close(clip_grad_norm_(params, 0.5), expected, {.rtol = 1e-5, .atol = 1e-6});
    for (const size_t i : {0, 3, 6}) {
      const auto& gradient = model.sharded[i].grad();
      expect_close(is_dtensor(gradient) ? full_tensor(gradient) : gradient,
                   model.whole[i].grad() * (0.5 / (expected + 1e-6)), {.rtol = 1e-5, .atol = 1e-6});
    }
  });
}

TEST_CASE("pending sums count as what they add up to, and gradients may differ in dtype") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto terms = at::randn({4, 3}, make_generator(static_cast<uint64_t>(rank)));
    const auto partial = from_local(terms, mesh, {Partial()});
    const auto whole = full_tensor(partial);
    const auto half = distribute_tensor(at::randn({5}, make_generator(7)).to(at::kBFloat16), mesh, {Shard(0)});
    const auto expected = at::linalg_vector_norm(at::cat({whole.flatten(), full_tensor(half).to(at::kFloat)}), 2.0);
    expect_close(get_total_norm({partial, half}), expected, {.rtol = 1e-5, .atol = 1e-6});
  });
}

TEST_CASE("complex gradients count by their absolute values") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto plain = at::randn({5}, make_generator(1), at::TensorOptions().dtype(at::kComplexFloat));
    for (const double p : {1.0, 2.0, kInf}) {
      auto param = distribute_tensor(at::zeros_like(plain), mesh, {Shard(0)});
      param.mutable_grad() = distribute_tensor(plain, mesh, {Shard(0)});
      const auto norm = clip_grad_norm_({param}, 0.5, {.norm_type = p});
      expect_close(norm, at::linalg_vector_norm(plain.abs(), p), {.rtol = 1e-5, .atol = 1e-6});
      expect_close(at::view_as_real(full_tensor(param.grad())),
                   at::view_as_real(plain * (0.5 / (norm.item<double>() + 1e-6))), {.rtol = 1e-5, .atol = 1e-6});
    }
  });
}

TEST_CASE("the norm of many parameters of one mesh costs one reduction an axis") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    std::vector<at::Tensor> gradients;
    for (uint64_t i = 0; i < 5; ++i) {
      gradients.push_back(distribute_tensor(at::randn({3, 2}, make_generator(i)), mesh, {Shard(0)}));
    }
    reset_comm_stats();
    get_total_norm(gradients);
    expect_equal(comm_stats()[Collective::AllReduce].calls, 1);
    expect_equal(comm_stats()[Collective::AllGather].calls, 0);
  });
}

TEST_CASE("a norm that is not finite, and wrong arguments, are errors on every rank") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    auto local = at::randn({2, 2}, make_generator(1));
    if (rank == 1) {
      local[0][0] = kInf;
    }
    auto param = distribute_tensor(at::randn({4, 2}, make_generator(2)), mesh, {Shard(0)});
    param.mutable_grad() = from_local(local, mesh, {Shard(0)});
    expect_throws<StateError>([&] { clip_grad_norm_({param}, 1.0, {.error_if_nonfinite = true}); },
                              "get_total_norm: the 2-norm of 1 gradients is inf");
    TESSERA_EXPECT(std::isinf(clip_grad_norm_({param}, 1.0).item<double>()));
    expect_throws<ValueError>([&] { get_total_norm({param}, {.norm_type = 0}); }, "norm_type is 0");
    expect_throws<ValueError>([&] { clip_grad_norm_({param}, -1.0); }, "max_norm is -1");
    expect_equal(get_total_norm({}).item<double>(), 0.0);
  });
}

TEST_CASE("gradients on a mesh of this rank alone beside those of all ranks are refused") {
  run_ranks(2, [](int rank) {
    const auto all = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto alone = init_device_mesh(at::kCPU, {1}, {"own"}, {rank});
    auto shared = distribute_tensor(at::ones({4}), all, {Shard(0)}).set_requires_grad(true);
    auto own = distribute_tensor(at::ones({3}), alone, {Shard(0)}).set_requires_grad(true);
    shared.mutable_grad() = distribute_tensor(at::ones({4}), all, {Shard(0)});
    own.mutable_grad() = distribute_tensor(at::full({3}, rank + 1.0), alone, {Shard(0)});
    expect_throws<ValueError>([&] { clip_grad_norm_({shared, own}, 0.5); }, "a norm of its own");
    clip_grad_norm_({shared}, 0.5);  // one by one, as the error says
    clip_grad_norm_({own}, 0.5);
    expect_close(full_tensor(shared.grad()), at::full({4}, 0.25));
  });
}

}  // namespace tessera
