// The "threads" backend on every device that there is: several ranks may share a GPU.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <thread>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/context/rank_context.h"
#include "comm/point_to_point.h"
#include "testing/expect.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

TEST_CASE("devices: every collective and a message") {
  run_ranks_on_devices(3, [](int rank, c10::Device device) {
    const ProcessGroupPtr& group = default_group();
    const auto floats = [&](std::vector<float> values) { return at::tensor(values).to(device); };
    const auto zeros = [&](int64_t numel) { return at::zeros({numel}, device); };
    const auto r = static_cast<float>(rank);
    const at::Tensor pair = floats({10 * r, 10 * r + 1}), whole = zeros(6), part = zeros(2);
    all_gather(whole, pair, group);
    expect_bit_equal(whole, floats({0, 1, 10, 11, 20, 21}));
    reduce_scatter(part, whole * (r + 1), ReduceOp::Avg, group);
    expect_bit_equal(part, floats({20 * r, 20 * r + 2}));
    all_reduce(pair, ReduceOp::Max, group);
    expect_bit_equal(pair, floats({20, 21}));
    const at::Tensor sent = floats({r, r});
    broadcast(sent, 1, group);
    expect_bit_equal(sent, floats({1, 1}));
    const at::Tensor exchanged = zeros(3);
    all_to_all(exchanged, floats({r, r + 10, r + 20}), {}, {}, group);
    expect_bit_equal(exchanged, floats({0 + 10 * r, 1 + 10 * r, 2 + 10 * r}));
    const at::Tensor own = zeros(rank);
    scatter(own, rank == 2 ? std::vector{zeros(0), floats({5}), floats({6, 7})} : std::vector<at::Tensor>(), 2, group);
    const std::vector<at::Tensor> parts = {zeros(0), zeros(1), zeros(2)};
    gather(rank == 0 ? parts : std::vector<at::Tensor>(), own, 0, group);
    if (rank == 0) {
      expect_bit_equal(parts[1], floats({5}));
      expect_bit_equal(parts[2], floats({6, 7}));
      send(floats({8}), 1, group);
    } else if (rank == 1) {
      const at::Tensor received = zeros(1);
      recv(received, 0, group);
      expect_bit_equal(received, floats({8}));
    }
    barrier(group);
  });
}

TEST_CASE("devices: several calls in flight, waited for in any order, and in a part of the ranks") {
  run_ranks_on_devices(4, [](int rank, c10::Device device) {
    const ProcessGroupPtr half = new_group(rank < 2 ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{2, 3});
    for (int step = 0; step < 20; ++step) {
      const at::Tensor a = at::full({1000}, 1.f + rank, device), b = at::full({3}, 10.f + rank, device);
      Pending first = all_reduce_async(a, ReduceOp::Sum, default_group());
      Pending second = all_reduce_async(b, ReduceOp::Product, half);
      (rank % 2 == 0 ? first : second).wait();
      (rank % 2 == 0 ? second : first).wait();
      expect_bit_equal(a, at::full({1000}, 10.f, device));
      expect_bit_equal(b, at::full({3}, rank < 2 ? 110.f : 156.f, device));
    }
  });
}

// On a GPU a rank's stream is busy when the call is brought.
TEST_CASE("devices: a call sees what the ranks' streams have written, and their next work sees the result") {
  run_ranks_on_devices(2, [](int rank, c10::Device device) {
    for (int step = 0; step < 5; ++step) {
      at::Tensor sum = at::zeros({1 << 18}, device);
      for (int i = 0; i < 200; ++i) {
        sum.add_(rank + 1);
      }
      all_reduce(sum, ReduceOp::Sum, default_group());
      expect_bit_equal(sum + 1, at::full({1 << 18}, 601.f, device));
    }
  });
}

TEST_CASE("devices: version counters stay, and leaves that need gradients are written") {
  run_ranks_on_devices(2, [](int, c10::Device device) {
    const at::Tensor leaf = at::ones({2}, device).requires_grad_(true);
    const int64_t version = leaf._version();
    all_reduce(leaf, ReduceOp::Sum, default_group());
    all_gather(leaf, leaf.detach()[0].clone(), default_group());
    expect_equal(leaf._version(), version);
    expect_bit_equal(leaf.detach(), at::full({2}, 2.f, device));
  });
}

TEST_CASE("devices: a tensor of one element may have any strides") {
  run_ranks_on_devices(2, [](int rank, c10::Device device) {
    const at::Tensor one = at::full({5}, 1.0 + rank, at::dtype(at::kDouble).device(device)).as_strided({1}, {3});
    const at::Tensor both = at::zeros({2}, one.options());
    all_gather(both, one, default_group());
    expect_bit_equal(both, at::tensor({1.0, 2.0}, at::kDouble).to(device));
    all_reduce(one, ReduceOp::Sum, default_group());
    broadcast(one, 1, default_group());
    expect_bit_equal(one.clone(), at::full({1}, 3.0, one.options()));
  });
}

TEST_CASE("devices: parts are for the CPU alone") {
  run_ranks_on_devices(2, [](int, c10::Device device) {
    expect_equal(supports_segments(default_group(), device.type()), device.is_cpu());
    if (!device.is_cpu()) {
      const auto parts = std::make_shared<std::vector<TensorSegment>>();
      const at::Tensor flat = at::zeros({2}, device);
      expect_throws<NotImplementedError>([&] { all_gather_segments_async(parts, flat, default_group()).wait(); },
                                         "with parts on cuda:0 over backend threads");
      expect_throws<NotImplementedError>(
          [&] { reduce_scatter_segments_async(flat, parts, ReduceOp::Sum, default_group()).wait(); },
          "ask supports_segments() first");
    }
  });
}

TEST_CASE("over the fake backend parts are for the CPU alone, too") {
  const RankContextGuard guard(RankContext::create());
  init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  CHECK(supports_segments(default_group(), at::kCPU));
  CHECK_FALSE(supports_segments(default_group(), at::kCUDA));
  destroy_process_group();
}

TEST_CASE("devices: ranks whose tensors are on different devices all learn it") {
  run_ranks_on_devices(2, [](int rank, c10::Device device) {
    const at::Tensor tensor = at::zeros({2}, rank == 0 ? c10::Device(c10::kCPU) : device);
    const auto reduce = [&] { all_reduce(tensor, ReduceOp::Sum, default_group()); };
    if (device.is_cpu()) {
      reduce();
    } else {
      expect_throws<CommError>(reduce, "rank 1: all_reduce(Sum, Float[2] on cuda:0)");
    }
    barrier(default_group());
  });
}

/// Sums the ranks' gradients in backward, and keeps who did it.
struct SummedGradient : torch::autograd::Function<SummedGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x.clone(); }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    thread = std::this_thread::get_id();
    auto sum = gradients[0].clone();
    all_reduce(sum, ReduceOp::Sum, default_group());
    return {sum};
  }

  static thread_local std::thread::id thread;
};
thread_local std::thread::id SummedGradient::thread;

TEST_CASE("devices: backward runs in the rank's own thread, so that its nodes may call collectives") {
  run_ranks_on_devices(3, [](int rank, c10::Device device) {
    const at::Tensor x = at::ones({4}, device).requires_grad_(true);
    (SummedGradient::apply(x) * (1.0 + rank)).sum().backward();
    expect_bit_equal(x.grad(), at::full({4}, 6.f, device));
    TESSERA_EXPECT(SummedGradient::thread == std::this_thread::get_id());
  });
}

}  // namespace
}  // namespace tessera
