#include "comm/adopted_group.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/point_to_point.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "tests/comm/cases/own_gloo.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

using Ints = std::vector<int64_t>;

float sum_over(const ProcessGroupPtr& group, int64_t numel) {
  const at::Tensor tensor = at::full({numel}, float(1 << get_rank()));
  all_reduce(tensor, ReduceOp::Sum, group);
  TESSERA_EXPECT(tensor.eq(tensor[0]).all().item<bool>());
  return tensor[0].item<float>();
}

float sum_by_c10d(c10d::Backend& backend) {
  std::vector<at::Tensor> tensors = {at::full({5}, float(1 << get_rank()))};
  backend.allreduce(tensors)->wait();
  return tensors[0][0].item<float>();
}

TEST_CASE("a group over a gloo backend of the program's own") {
  run_processes(4, [](int rank) {
    if (rank == 0) {
      return;
    }
    const Ints ranks = {3, 1, 2};
    const auto theirs = connect_own_gloo("own", ranks);
    {
      const ProcessGroupPtr group = adopt_group(theirs, ranks, "team");
      expect_equal(get_backend(group), std::string("gloo"));
      expect_equal(group_name(group), std::string("team"));
      expect_equal(group_ranks(group), ranks);
      expect_equal(get_rank(group), rank == 3 ? 0 : rank);
      expect_equal(get_world_size(group), 3);
      TESSERA_EXPECT(has_backend(group, at::kCPU) && !has_backend(group, at::kCUDA));
      for (const int64_t numel : {1, 40000}) {  // one round of messages, and two
        expect_equal(sum_over(group, numel), 14.f);
        expect_equal(sum_by_c10d(*theirs), 14.f);
      }
      const at::Tensor gathered = at::zeros({3}, at::kLong);
      all_gather(gathered, at::full({1}, rank), group);
      TESSERA_EXPECT(gathered.equal(at::arange(3).add(2).remainder(3).add(1)));  // 3, 1, 2
      const at::Tensor passed = at::zeros({2});
      Pending sent = send_async(at::full({2}, float(rank)), (get_rank(group) + 1) % 3, group);
      recv(passed, (get_rank(group) + 2) % 3, group);
      sent.wait();
      expect_equal(passed[1].item<float>(), float(ranks[(get_rank(group) + 2) % 3]));
      barrier(group);
    }
    expect_equal(sum_by_c10d(*theirs), 14.f);  // the group has gone, its connections are the program's
  });
}

TEST_CASE("an adopted group keeps its connections") {
  run_processes(2, [](int) {
    const ProcessGroupPtr group = adopt_group(connect_own_gloo("kept", {0, 1}), {0, 1});
    expect_equal(sum_over(group, 3), 3.f);
    barrier(default_group());
  });
}

TEST_CASE("what cannot be adopted") {
  run_processes(2, [](int rank) {
    const auto theirs = connect_own_gloo("whole", {1, 0});
    expect_throws<ValueError>(
        [&] {
          adopt_group(theirs, {0, 1}, "tp");
        },
        fmt::format("adopt_group(\"tp\"): the backend is rank {} of 2, but the caller rank {} of 2", 1 - rank, rank));
    expect_throws<ValueError>([&] { adopt_group(theirs, {rank}); }, "of 2, but the caller rank 0 of 1");
    expect_throws<ValueError>([&] { adopt_group(theirs, {0, 2}); }, "ranks [0, 2]; the default group has ranks 0 to 1");
    expect_throws<ValueError>([&] { adopt_group(theirs, {1 - rank}); }, "are without the caller");
    expect_throws<ValueError>([&] { adopt_group({}, {0, 1}); }, "the backend is undefined");
    expect_throws<NotImplementedError>(
        [&] {
          adopt_group(default_group()->getBackend(at::kCPU), {0, 1});
        },
        "only a c10d::ProcessGroupGloo can be adopted");
    const auto on_two = connect_own_gloo("two devices", {0, 1}, /*num_devices=*/2);
    expect_throws<NotImplementedError>(
        [&] {
          adopt_group(on_two, {0, 1}, "tp");
        },
        "adopt_group(\"tp\"): the backend has 2 network devices");
    barrier(default_group());  // the other may still be connecting
  });
}

}  // namespace
}  // namespace tessera::testing
