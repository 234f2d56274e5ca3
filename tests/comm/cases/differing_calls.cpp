#include "tests/comm/cases/differing_calls.h"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "testing/run_processes.h"

namespace tessera::testing {

namespace {

/// A collective over a group of two ranks, and what an error says of it.
struct Call {
  std::string name;
  std::function<void(const ProcessGroupPtr& group)> run;
};

Call reduction(ReduceOp op, at::ScalarType dtype = at::kFloat, int64_t numel = 4) {
  return {fmt::format("all_reduce({}, {}[{}])", op, c10::toString(dtype), numel),
          [=](const auto& group) { all_reduce(at::zeros({numel}, dtype), op, group); }};
}

Call gather_of(int64_t numel) {
  return {fmt::format("all_gather(Float[{}])", numel),
          [=](const auto& group) { all_gather(at::zeros({2 * numel}), at::zeros({numel}), group); }};
}

Call broadcast_of(int64_t numel) {
  return {fmt::format("broadcast(source 0, Float[{}])", numel),
          [=](const auto& group) { broadcast(at::zeros({numel}), 0, group); }};
}

// Of rank 0's, `numel` elements for each rank, and of rank 1's.
Call scatter_of(int64_t numel) {
  const at::Tensor part = at::zeros({numel});
  return {fmt::format("all_to_all(Float[{}])", 2 * numel), [=](const auto& group) {
            scatter(part, {part, part}, 0, group);
          }};
}

Call scatter_to(int64_t numel) {
  return {"all_to_all(Float[0])", [=](const auto& group) { scatter(at::zeros({numel}), {}, 0, group); }};
}

}  // namespace

void check_calls_that_differ(const std::string& backend) {
  const auto body = [&](int rank) {
    const std::vector<std::array<Call, 2>> pairs = {
        {reduction(ReduceOp::Sum), reduction(ReduceOp::Max)},
        {reduction(ReduceOp::Sum), reduction(ReduceOp::Sum, at::kInt)},
        {reduction(ReduceOp::Sum, at::kFloat, 1 << 20), reduction(ReduceOp::Sum, at::kFloat, 1 << 21)},
        {reduction(ReduceOp::Sum), gather_of(4)},
        {reduction(ReduceOp::Sum), Call{"barrier()", [](const auto& group) { barrier(group); }}},
        {gather_of(4), gather_of(8)},
        {gather_of(0), gather_of(4)},
        {broadcast_of(8), broadcast_of(4)},
        {scatter_of(8), scatter_to(4)},
        {scatter_of(0), scatter_to(4)},
    };
    destroy_process_group();
    init_process_group({.backend = backend, .timeout = std::chrono::milliseconds(1500)});
    // All at once, each over a group and in a thread of its own: over gloo each waits for the time-out.
    std::vector<std::future<void>> results;
    for (size_t i = 0; i < pairs.size(); ++i) {
      const std::string name = fmt::format("pair {}", i);
      results.push_back(std::async(std::launch::async, [call = pairs[i][rank], name, group = new_group({0, 1}, name)] {
        expect_throws<CommError>([&] { call.run(group); }, fmt::format("{} on group '{}'", call.name, name));
      }));
    }
    for (std::future<void>& result : results) {
      result.get();
    }
    destroy_process_group();
    init_process_group({.backend = backend});
  };
  run_processes(2, body, {.backend = backend});
}

}  // namespace tessera::testing
