#include "comm/process_group.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/context/comm_stats.h"
#include "comm/context/rank_context.h"
#include "comm/launch/store.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;
using Ranks = std::vector<int64_t>;

/// A rank context of the test's own, so that tests do not share the process's.
struct Fresh {
  RankContextGuard guard{RankContext::create()};
};

TEST_CASE("a plain program is one rank") {
  Fresh fresh;
  CHECK_FALSE(is_initialized());
  init_process_group();
  CHECK(get_rank() == 0);
  CHECK(get_world_size() == 1);
  CHECK(group_ranks(default_group()) == Ranks{0});
  CHECK_THROWS_WITH(init_process_group(), ContainsSubstring("set up already"));
  destroy_process_group();
  CHECK_FALSE(is_initialized());
  init_process_group({.backend = "gloo", .rank = 0, .world_size = 1});
  CHECK(default_group()->getBackendName() == "gloo");
  destroy_process_group();
}

TEST_CASE("threads carry tensors of the CPU and of a GPU that is there, cpu:threads those of the CPU") {
  for (const bool both : {true, false}) {
    Fresh fresh;
    init_process_group({.backend = both ? "threads" : "cpu:threads", .rank = 0, .world_size = 1});
    CHECK(get_backend(default_group()) == "threads");
    for (const auto& group : {default_group(), new_group({0})}) {
      CHECK(has_backend(group, at::kCPU));
      CHECK(has_backend(group, at::kCUDA) == (both && at::hasCUDA()));
    }
    destroy_process_group();
  }
}

TEST_CASE("without a group every question says how to get one") {
  Fresh fresh;
  CHECK_THROWS_AS(default_group(), StateError);
  CHECK_THROWS_WITH(get_rank(), ContainsSubstring("get_rank: there is no default process group; call init_process"));
  CHECK_THROWS_AS(get_world_size(), StateError);
  CHECK_THROWS_AS(new_group({0}), StateError);
  CHECK_THROWS_AS(destroy_process_group(), StateError);
}

TEST_CASE("options that make no sense") {
  Fresh fresh;
  const auto init = [](ProcessGroupOptions options) { return [options] { init_process_group(options); }; };
  CHECK_THROWS_AS(init({.backend = "glue"})(), ValueError);
  CHECK_THROWS_WITH(init({.backend = "glue"})(), ContainsSubstring("\"glue\" is unknown"));
  CHECK_THROWS_WITH(init({.rank = 1})(), ContainsSubstring("rank 1 and world_size -1; give both"));
  CHECK_THROWS_WITH(init({.rank = 2, .world_size = 2})(), ContainsSubstring("rank 2 of 2 ranks"));
  CHECK_THROWS_WITH(init({.backend = "threads", .rank = 0, .world_size = 2})(), ContainsSubstring("thread_world"));
  CHECK_THROWS_WITH(init({.timeout = std::chrono::milliseconds(0)})(), ContainsSubstring("timeout 0 ms"));
  CHECK_THROWS_WITH(init({.backend = "gloo", .rank = 0, .world_size = 2})(), ContainsSubstring("MASTER_ADDR"));
  CHECK_FALSE(is_initialized());
}

TEST_CASE("rank 0 that cannot be reached is named by address and port") {
  Fresh fresh;
  const auto connect = [] {
    init_process_group({.backend = "gloo",
                        .rank = 1,
                        .world_size = 2,
                        .timeout = std::chrono::milliseconds(300),
                        .master_addr = "127.0.0.1",
                        .master_port = 1});
  };
  CHECK_THROWS_AS(connect(), CommError);
  CHECK_THROWS_WITH(connect(), ContainsSubstring("rank 1 of 2 could not reach rank 0 at 127.0.0.1:1"));
}

TEST_CASE("a store that is connected once has the time-out of who connects to it last") {
  StoreOptions options{.address = "127.0.0.1", .timeout = std::chrono::seconds(30)};
  const auto store = connect_store(options);
  CHECK(store->getTimeout() == std::chrono::seconds(30));
  options.timeout = std::chrono::milliseconds(50);
  CHECK(connect_store(options) == store);
  CHECK(store->getTimeout() == std::chrono::milliseconds(50));
  CHECK_THROWS(store->get("nobody sets it"));
}

TEST_CASE("sub-groups: order, names, repeated creation, one rank") {
  run_ranks(4, [](int rank) {
    for (int round = 0; round < 3; ++round) {
      const Ranks ranks = rank % 2 == 0 ? Ranks{2, 0} : Ranks{1, 3};
      const ProcessGroupPtr group = new_group(ranks, "half");
      expect_equal(get_world_size(group), 2);
      expect_equal(get_rank(group), rank == 2 || rank == 1 ? 0 : 1);
      expect_equal(group_ranks(group), ranks);
      expect_equal(group_name(group), std::string("half"));
      at::Tensor gathered = at::zeros({2}, at::kLong);
      all_gather(gathered, at::full({1}, rank, at::kLong), group);
      expect_equal(gathered[0].item<int64_t>(), ranks[0]);
      expect_equal(gathered[1].item<int64_t>(), ranks[1]);
    }
    const ProcessGroupPtr alone = new_group({rank}, "alone");
    expect_equal(get_world_size(alone), 1);
    at::Tensor tensor = at::full({1}, float(rank));
    all_reduce(tensor, ReduceOp::Sum, alone);
    expect_equal(tensor.item<float>(), float(rank));
  });
}

TEST_CASE("ranks of a new group are checked") {
  run_ranks(2, [](int rank) {
    expect_throws<ValueError>([] { new_group({}); }, "no ranks");
    expect_throws<ValueError>([] { new_group({0, 2}); }, "ranks [0, 2]; the default group has ranks 0 to 1");
    expect_throws<ValueError>([] { new_group({0, 1, 0}); }, "each may be there once");
    expect_throws<ValueError>([&] { new_group({1 - rank}, "peer"); }, "without the caller");
  });
}

TEST_CASE("the fake backend has any number of ranks and only its own data") {
  Fresh fresh;
  init_process_group({.backend = "fake", .rank = 2, .world_size = 1024});
  CHECK(get_rank() == 2);
  CHECK(get_world_size() == 1024);
  const ProcessGroupPtr group = new_group({1, 2, 3}, "three");
  at::Tensor input = at::arange(2, at::kFloat) + 5, gathered = at::zeros({6});
  all_gather(gathered, input, group);
  CHECK(gathered.equal(input.repeat({3})));
  at::Tensor part = at::zeros({2});
  reduce_scatter(part, at::arange(6, at::kFloat), ReduceOp::Sum, group);
  CHECK(part.equal(at::arange(2, 4, at::kFloat)));
  at::Tensor exchanged = at::full({3}, 9.f);
  all_to_all(exchanged, at::arange(3, at::kFloat), {}, {}, group);
  CHECK(exchanged.equal(at::arange(3, at::kFloat) * (at::arange(3) == 1)));
  all_reduce(part, ReduceOp::Avg, group);
  broadcast(part, 0, group);
  barrier(group);
  CHECK(part.equal(at::arange(2, 4, at::kFloat)));
  CHECK(comm_stats()[Collective::AllGather].bytes_sent == 2 * 8);
}

}  // namespace
}  // namespace tessera
