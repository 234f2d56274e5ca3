// Norms of local shards, put together, are those of the whole tensors; and which shards are one list.

#include "dtensor/shard_norms.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "base/error.h"
#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

struct ShardedTensors {
  std::vector<at::Tensor> sharded;
  std::vector<at::Tensor> whole;

  void add(at::Tensor tensor, const DeviceMesh& mesh, const Placements& placements) {
    sharded.push_back(distribute_tensor(tensor, mesh, placements));
    whole.push_back(tensor.to(at::kDouble).flatten());
  }
};

/// Cut along both axes, one or none, with empty shards, in two dtypes and in memory of another order.
ShardedTensors make_sharded_tensors(const DeviceMesh& mesh, c10::Device device) {
  ShardedTensors tensors;
  auto random = [&, seed = uint64_t{0}](at::IntArrayRef sizes) mutable {
    return at::randn(sizes, make_generator(seed++)).to(device);
  };
  tensors.add(random({5, 7}), mesh, {Shard(0), Shard(1)});
  tensors.add(random({6, 4}), mesh, {Shard(0, 1), Shard(0)});
  tensors.add(random({1, 4}), mesh, {Shard(0), Shard(0)});  // empty on all ranks but one
  tensors.add(random({4, 9}).t(), mesh, {Shard(0), Shard(1)});
  tensors.add(random({3, 3}), mesh, {Replicate(), Shard(0)});
  tensors.add(random({5}).to(at::kBFloat16), mesh, {Shard(0), Replicate()});
  tensors.add(random({7}).to(at::kBFloat16), mesh, {Shard(0), Shard(0)});
  tensors.add(random({4}), mesh, {Replicate(), Replicate()});
  return tensors;
}

/// What a kernel does, by ATen, and how often it was asked.
struct CountingNorm {
  double p;
  int calls = 0;

  at::Tensor operator()(at::TensorList locals) {
    ++calls;
    std::vector<at::Tensor> flat;
    for (const auto& local : locals) {
      TESSERA_EXPECT(local.is_contiguous() && local.scalar_type() == locals[0].scalar_type());
      flat.push_back(local.flatten());
    }
    const auto all = at::cat(flat).to(at::kFloat);
    return all.numel() == 0 ? at::zeros({}, all.options()) : at::linalg_vector_norm(all, p);
  }
};

}  // namespace

TEST_CASE("the norm of shards in lists is that of all elements") {
  const double p = GENERATE(1.0, 2.0, std::numeric_limits<double>::infinity());
  for (const int world_size : {2, 4, 6}) {
    CAPTURE(p);
    run_ranks_on_devices(world_size, [&](int, c10::Device device) {
      const auto mesh = init_device_mesh(device.type(), {world_size / 2, 2}, {"dp", "tp"});
      const auto tensors = make_sharded_tensors(mesh, device);
      CountingNorm local_norm{.p = p};
      const auto norms = norms_of_shards(tensors.sharded, p, at::kFloat, std::ref(local_norm));
      expect_equal(local_norm.calls, 5);
      expect_equal(norms.size(), size_t{5});
      const auto norm = full_tensor(at::linalg_vector_norm(at::stack(norms), p));
      expect_close(norm, at::linalg_vector_norm(at::cat(tensors.whole), p).to(at::kFloat),
                   {.rtol = 1e-5, .atol = 1e-6});
    });
  }
}

TEST_CASE("the norm of shards in lists costs one reduction an axis, as that of each tensor does") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    std::vector<at::Tensor> tensors;
    for (uint64_t i = 0; i < 5; ++i) {
      tensors.push_back(distribute_tensor(at::randn({3, 5}, make_generator(i)), mesh, {Shard(0), Shard(1)}));
    }
    const auto reductions = [&](const std::vector<at::Tensor>& norms) {
      reset_comm_stats();
      full_tensor(at::linalg_vector_norm(at::stack(norms), 2));
      return comm_stats()[Collective::AllReduce].calls;
    };
    CountingNorm local_norm{.p = 2};
    const auto calls = reductions(norms_of_shards(tensors, 2, at::kFloat, std::ref(local_norm)));
    expect_equal(calls, reductions(at::_foreach_norm(tensors, 2)));
    TESSERA_EXPECT(calls <= 2);
    expect_equal(local_norm.calls, 1);
  });
}

TEST_CASE("a view that does not see what was written since has no norm of shards") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto tensor = distribute_tensor(at::randn({4, 3}, make_generator(1)), mesh, {Shard(0)});
    const auto view = tensor.view({12}).view({2, 6});
    const auto copied = tensor.view({3, 4});  // cuts rows otherwise: a copy
    tensor.add_(1);
    CountingNorm local_norm{.p = 2};
    norms_of_shards({view}, 2, at::kFloat, std::ref(local_norm));
    expect_throws<StateError>([&] { norms_of_shards({copied}, 2, at::kFloat, std::ref(local_norm)); },
                              "the norm of gradients");
  });
}

}  // namespace tessera
