// Batch norms in training, whose statistics are those of a batch that ranks share.

#include <ATen/TensorOperators.h>
#include <ATen/ops/_batch_norm_with_update.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/batch_norm_backward.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <tuple>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

constexpr double kMomentum = 0.1, kEps = 1e-5;

std::vector<Input> batch_norm_inputs(std::vector<int64_t> sizes) {
  const int64_t channels = sizes[1];
  return {{std::move(sizes)}, {{channels}}, {{channels}}, {{channels}}, positive({channels})};
}

/// Of (input, weight, bias, running mean, running variance).
OpCase forward_case(const char* name, std::vector<int64_t> sizes, std::function<Tensors(const Tensors&)> call) {
  return {
      .name = name, .inputs = batch_norm_inputs(std::move(sizes)), .call = [call = std::move(call)](const Tensors& x) {
        return call({x[0], x[1], x[2], x[3].detach().clone(), x[4].detach().clone()});
      }};
}

at::Tensor batch_norm_in_training(const Tensors& x) {
  return at::batch_norm(x[0], x[1], x[2], x[3], x[4], /*training=*/true, kMomentum, kEps, /*cudnn_enabled=*/false);
}

template <class Tuple>
Tensors list(const Tuple& tuple) {
  return std::apply([](const auto&... tensors) { return Tensors{tensors...}; }, tuple);
}

/// Some kernels give more than the mask asks for.
template <class Tuple>
Tensors wanted(const Tuple& gradients, const std::array<bool, 3>& mask) {
  auto tensors = list(gradients);
  size_t next = 0;
  std::erase_if(tensors, [&](const at::Tensor&) { return !mask[next++]; });
  return tensors;
}

}  // namespace

TEST_CASE("batch norms in training, by the names of their ops", "[dtensor][ops]") {
  const auto native = [](const Tensors& x) -> Tensors {
    const auto [y, mean, deviation] =
        at::native_batch_norm(x[0], x[1], x[2], x[3], x[4], /*training=*/true, kMomentum, kEps);
    return {y, mean, deviation, x[3], x[4]};
  };
  const auto legit = [](const Tensors& x) -> Tensors {
    auto running_mean = x[3], running_var = x[4];
    const auto [y, mean, deviation] =
        at::_native_batch_norm_legit(x[0], x[1], x[2], running_mean, running_var, true, kMomentum, kEps);
    return {y, mean, deviation, x[3], x[4]};
  };
  const auto with_update = [](const Tensors& x) -> Tensors {
    auto running_mean = x[3], running_var = x[4];
    const auto [y, mean, deviation, reserve] =
        at::_batch_norm_with_update(x[0], x[1], x[2], running_mean, running_var, kMomentum, kEps);
    return {y, mean, deviation, x[3], x[4]};
  };
  const auto legit_functional = [](const Tensors& x) {
    return list(at::_native_batch_norm_legit_functional(x[0], x[1], x[2], x[3], x[4], true, kMomentum, kEps));
  };
  // Which returns statistics also on ranks without items, as CUDA's kernels of all of them do.
  const auto functional_in_evaluation = [](const Tensors& x) {
    return list(at::_native_batch_norm_legit_functional(x[0], x[1], x[2], x[3], x[4], false, kMomentum, kEps));
  };
  const auto functional = [](const Tensors& x) {
    auto all = list(at::_batch_norm_with_update_functional(x[0], x[1], x[2], x[3], x[4], kMomentum, kEps));
    all.erase(all.begin() + 3);  // what kernels keep for themselves
    return all;
  };
  std::vector<OpCase> cases = {
      forward_case("native_batch_norm of rows", {5, 3}, native),
      forward_case("native_batch_norm of images", {3, 2, 2, 3}, native),
      forward_case("native_batch_norm of one volume", {1, 2, 3, 2, 1}, native),
      forward_case("_native_batch_norm_legit", {4, 3, 2}, legit),
      forward_case("_batch_norm_with_update", {4, 3, 2}, with_update),
      forward_case("_native_batch_norm_legit_functional", {4, 3, 2}, legit_functional),
      forward_case("_native_batch_norm_legit_functional, evaluation", {2, 3, 2}, functional_in_evaluation),
      forward_case("_batch_norm_with_update_functional", {4, 3, 2}, functional),
      {.name = "_native_batch_norm_legit.no_stats",
       .inputs = {{{3, 2, 2}}, {{2}}},
       .call = [](const Tensors& x) { return list(at::_native_batch_norm_legit(x[0], x[1], {}, true, 0.1, kEps)); }},
  };
  for (auto& test : cases) {
    test.gradients = test.name.find("functional") == std::string::npos;  // which have none
  }
  CHECK_NOTHROW(check_ops(cases));
}

TEST_CASE("gradients of batch norms in training, by the names of their ops", "[dtensor][ops]") {
  std::vector<OpCase> cases;
  // Of (gradient, input, weight, saved mean, saved inverse deviation).
  const std::vector<Input> inputs = {{{4, 3, 2}}, {{4, 3, 2}}, {{3}}, {{3}}, positive({3})};
  const auto add = [&](const char* name, std::function<Tensors(const Tensors&)> call) {
    cases.push_back({.name = name, .inputs = inputs, .call = std::move(call), .gradients = false});
  };
  for (const std::array<bool, 3> mask : {std::array{true, true, true}, std::array{true, false, false},
                                         std::array{false, true, true}, std::array{false, false, true}}) {
    add("native_batch_norm_backward", [=](const Tensors& x) {
      return wanted(at::native_batch_norm_backward(x[0], x[1], x[2], {}, {}, x[3], x[4], true, kEps, mask), mask);
    });
    add("batch_norm_backward", [=](const Tensors& x) {
      const auto reserve = x[3].to(at::kByte).narrow(0, 0, 0);
      return wanted(at::batch_norm_backward(x[0], x[1], x[2], {}, {}, x[3], x[4], true, kEps, mask, reserve), mask);
    });
  }
  cases.push_back({.name = "the gradient of a gradient", .inputs = {{{4, 3, 2}}, {{3}}}, .call = [](const Tensors& x) {
                     const auto y = at::batch_norm(x[0], x[1], {}, {}, {}, true, kMomentum, kEps, false);
                     return torch::autograd::grad({y.pow(3).sum()}, {x[0], x[1]}, {}, /*retain_graph=*/true,
                                                  /*create_graph=*/true);
                   }});
  CHECK_NOTHROW(check_ops(cases));
}

namespace {

std::string sent() {
  return fmt::format("{} calls {} bytes", comm_stats().calls(), comm_stats().bytes_sent());
}

/// What a batch [5, 3, 2] on `shape`, cut by `cut`, sends in forward and backward; the placements of the result and of
/// the gradients of input and weight.
std::string traffic(const std::vector<int64_t>& shape, const Placements& cut) {
  const auto mesh = init_device_mesh(at::kCPU, shape);
  const auto place_as = [&](const at::Tensor& tensor, const Placements& placements) {
    return distribute_tensor(tensor, mesh, placements);
  };
  Placements vectors(shape.size(), Replicate());
  for (size_t axis = 0; axis < cut.size(); ++axis) {
    vectors[axis] = cut[axis] == Shard(1) ? Placement(Shard(0)) : vectors[axis];
  }
  const auto input = place_as(at::randn({5, 3, 2}, make_generator(1)), cut).requires_grad_();
  const auto weight = place_as(at::ones({3}), vectors).requires_grad_();
  const auto mean = place_as(at::zeros({3}), vectors), var = place_as(at::ones({3}), vectors);
  const auto grad = place_as(at::randn({5, 3, 2}, make_generator(2)), cut);
  reset_comm_stats();
  const auto y = batch_norm_in_training({input, weight, {}, mean, var});
  const auto forward = sent();
  reset_comm_stats();
  y.backward(grad);
  const auto backward = sent();
  return fmt::format("forward {}, backward {}, {} {} {}", forward, backward, to_string(placements(y)),
                     to_string(placements(input.grad())), to_string(placements(weight.grad())));
}

}  // namespace

TEST_CASE("a cut batch is normalized in training without being gathered", "[dtensor][ops]") {
  // An all-gather of a mean, a sum of squares for each channel and a count, and an all-reduce of two sums a channel.
  run_ranks(2, [](int) {
    expect_equal(traffic({2}, {Shard(0)}),
                 "forward 1 calls 56 bytes, backward 1 calls 48 bytes, (Shard(0)) (Shard(0)) "
                 "(Replicate())");
    expect_equal(traffic({2}, {Shard(2)}),
                 "forward 1 calls 56 bytes, backward 1 calls 48 bytes, (Shard(2)) (Shard(2)) "
                 "(Replicate())");
    expect_equal(traffic({2}, {Shard(1)}),
                 "forward 0 calls 0 bytes, backward 0 calls 0 bytes, (Shard(1)) (Shard(1)) "
                 "(Shard(0))");
    expect_equal(traffic({2}, {Replicate()}),
                 "forward 0 calls 0 bytes, backward 0 calls 0 bytes, (Replicate()) "
                 "(Replicate()) (Replicate())");
  });
  run_ranks(4, [](int rank) {
    expect_equal(traffic({2, 2}, {Shard(0), Shard(0)}),
                 "forward 2 calls 112 bytes, backward 2 calls 96 bytes, (Shard(0), Shard(0)) (Shard(0), Shard(0)) "
                 "(Replicate(), Replicate())");
    expect_equal(traffic({2, 2}, {Shard(2), Shard(0)}),
                 "forward 2 calls 112 bytes, backward 2 calls 96 bytes, (Shard(2), Shard(0)) (Shard(2), Shard(0)) "
                 "(Replicate(), Replicate())");
    const bool has_two_channels = rank % 2 == 0;
    expect_equal(traffic({2, 2}, {Shard(0), Shard(1)}),
                 fmt::format("forward 1 calls {} bytes, backward 1 calls {} bytes, (Shard(0), Shard(1)) (Shard(0), "
                             "Shard(1)) (Replicate(), Shard(0))",
                             has_two_channels ? 40 : 24, has_two_channels ? 32 : 16));
  });
}

TEST_CASE("batch norms in training of floats of 16 and 32 bits, channels last or not", "[dtensor][ops]") {
  struct Dtypes {
    at::ScalarType input, parameters;
    double tolerance;
  };
  for (const auto& dtypes : {Dtypes{at::kFloat, at::kFloat, 1e-5}, Dtypes{at::kBFloat16, at::kFloat, 2e-2},
                             Dtypes{at::kBFloat16, at::kBFloat16, 2e-2}, Dtypes{at::kHalf, at::kFloat, 3e-3},
                             Dtypes{at::kHalf, at::kHalf, 3e-3}}) {
    for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      run_ranks_on_devices(3, [&](int, c10::Device device) {
        if (!device.is_cpu() && dtypes.input != at::kFloat && dtypes.parameters != at::kFloat) {
          return;  // whose own norms give other dtypes
        }
        const auto mesh = init_device_mesh(device.type(), {3});
        const auto run = [&](const std::function<at::Tensor(const at::Tensor&)>& place_input,
                             const std::function<at::Tensor(const at::Tensor&)>& place_vector) {
          auto generator = make_generator(5);
          const auto vector = [&](double offset) {
            return place_vector(at::randn({3}, generator).abs().add(offset).to(device, dtypes.parameters));
          };
          const auto x =
              place_input(at::randn({4, 3, 2, 2}, generator).add(2).to(device, dtypes.input).contiguous(format))
                  .requires_grad_();
          const auto weight = vector(0.5).requires_grad_(), bias = vector(0).requires_grad_();
          const auto mean = vector(0), var = vector(0.5);
          const auto [y, saved_mean, saved_deviation] =
              at::native_batch_norm(x, weight, bias, mean, var, true, kMomentum, kEps);
          y.sin().sum().backward();
          return Tensors{y.detach(), saved_mean, saved_deviation, mean, var, x.grad(), weight.grad(), bias.grad()};
        };
        const auto expected = run([](const at::Tensor& x) { return x; }, [](const at::Tensor& x) { return x; });
        const auto actual = run([&](const at::Tensor& x) { return distribute_tensor(x, mesh, {Shard(0)}); },
                                [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {Replicate()}); });
        for (size_t i = 0; i < expected.size(); ++i) {
          expect_close(full_tensor(actual[i]).cpu(), expected[i].cpu(),
                       {.rtol = dtypes.tolerance, .atol = dtypes.tolerance});
        }
      });
    }
  }
}

TEST_CASE("statistics of a cut batch keep their digits beside a large mean, and are the same on all ranks",
          "[dtensor][ops]") {
  for (const int ranks : {2, 3, 4}) {
    const auto x = at::randn({3, 2, 7}, make_generator(3)).add_(4096);
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      const auto cut = distribute_tensor(x, mesh, {Shard(0)});
      const auto [y, mean, deviation] = at::native_batch_norm(cut, {}, {}, {}, {}, true, kMomentum, kEps);
      const auto exact = x.to(at::kDouble);
      expect_close(full_tensor(mean), exact.mean(at::IntArrayRef({0, 2})).to(at::kFloat), {.rtol = 2e-7, .atol = 0});
      // Squares less the square of the mean would leave no digit of the variance.
      expect_close(full_tensor(deviation),
                   exact.var(at::IntArrayRef({0, 2}), /*unbiased=*/false).add(kEps).rsqrt().to(at::kFloat),
                   {.rtol = 1e-4, .atol = 0});
      // What one rank holds, as a term beside zeros of the others: the sum is any rank's.
      for (const auto& statistics : {mean, deviation}) {
        for (int64_t source = 0; source < ranks; ++source) {
          const auto own = to_local(statistics);
          const auto term = mesh.coordinate()[0] == source ? own.clone() : at::zeros_like(own);
          expect_bit_equal(full_tensor(from_local(term, mesh, {Partial()})), own);
        }
      }
    });
  }
}

TEST_CASE("a cut batch of one value a channel, and channels without deviation", "[dtensor][ops]") {
  const auto same_statistics = [](const at::Tensor& x, double eps) {
    const auto run = [&](const at::Tensor& input, const at::Tensor& mean, const at::Tensor& var) {
      const auto y = at::native_batch_norm(input, {}, {}, mean, var, true, kMomentum, eps);
      return Tensors{std::get<0>(y), std::get<2>(y), mean, var};
    };
    const auto expected = run(x, at::zeros({3}), at::ones({3}));
    run_ranks(2, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {2});
      const auto copies = [&](const at::Tensor& tensor) { return distribute_tensor(tensor, mesh, {Replicate()}); };
      const auto actual = run(distribute_tensor(x, mesh, {Shard(0)}), copies(at::zeros({3})), copies(at::ones({3})));
      for (size_t i = 0; i < expected.size(); ++i) {
        expect_close(full_tensor(actual[i]), expected[i], {.rtol = 1e-5, .atol = 1e-4});
      }
    });
  };
  same_statistics(at::randn({1, 3}, make_generator(1)), kEps);  // a running variance of NaN, as on one device
  same_statistics(at::ones({4, 3}), 0);
  run_ranks(2, [](int) {  // of which the second has no item
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({1, 3}), mesh, {Shard(0)});
    const auto weight = distribute_tensor(at::ones({3}, at::kDouble), mesh, {Replicate()});
    expect_throws<c10::Error>([&] { batch_norm_in_training({x, weight, {}, {}, {}}); }, "mixed dtype");
  });
}

}  // namespace tessera
