// The unit's state machine and the division of gradients: values only.

#include "fully_shard/events/sharded_state.h"

#include "base/error.h"
#include "fully_shard/reduce/gradient_reducer.h"
#include "third_party/catch2/catch.h"

namespace tessera {

TEST_CASE("all transitions of a unit; every other one is refused") {
  using enum ShardedState;
  using enum FSDPEventKind;
  const auto states = {Sharded, Unsharding, Unsharded, ShardedPostForward};
  const auto steps = {Gather, Unshard, Drop, Reshard, ReshardPostForward, Forward, Backward, ReduceScatter};
  std::string table;
  for (const auto state : states) {
    for (const auto step : steps) {
      try {
        table += fmt::format("{} {} {}\n", to_string(state), to_string(step), to_string(next_state(state, step)));
      } catch (const AssertionError&) {
      }
    }
  }
  CHECK(table ==
        "Sharded gather Unsharding\n"
        "Unsharding unshard Unsharded\n"
        "Unsharding drop Sharded\n"
        "Unsharded reshard Sharded\n"
        "Unsharded reshard_post_forward ShardedPostForward\n"
        "ShardedPostForward gather Unsharding\n"
        "ShardedPostForward reshard Sharded\n");
  CHECK(next_state(Unsharding, Drop, /*has_post_forward_shard=*/true) == ShardedPostForward);
  CHECK_THROWS_WITH(next_state(Sharded, Unshard), Catch::Contains("a unit that is Sharded cannot unshard"));
}

TEST_CASE("an event is printed as its step and its unit") {
  CHECK(to_string(FSDPEvent{FSDPEventKind::ReduceScatter, "blocks.0"}) == "reduce_scatter blocks.0");
  CHECK(to_string(FSDPEvent{FSDPEventKind::KeepGradients, "root"}) == "keep_gradients root");
}

TEST_CASE("gradients are averaged by the collective unless a factor or plain sums are asked for") {
  CHECK(gradient_scale({.num_ranks = 6}) == GradientScale{.before = 1, .op = ReduceOp::Avg, .after = 1});
  CHECK(gradient_scale({.num_ranks = 6, .divide_factor = 2.5}) ==
        GradientScale{.before = 1, .op = ReduceOp::Sum, .after = 2.5});
  CHECK(gradient_scale({.num_ranks = 6, .force_sum = true}) ==
        GradientScale{.before = 1, .op = ReduceOp::Sum, .after = 6});
  CHECK(gradient_scale({.num_ranks = 6, .divide_factor = 1.0, .force_sum = true}) ==
        GradientScale{.before = 1, .op = ReduceOp::Sum, .after = 1});
}

TEST_CASE("in float16 a part of the division comes before the sum") {
  const auto half = [](double factor) {
    return gradient_scale({.num_ranks = 4, .divide_factor = factor, .reduce_dtype = at::kHalf});
  };
  CHECK(half(24) == GradientScale{.before = 8, .op = ReduceOp::Sum, .after = 3});
  CHECK(half(4) == GradientScale{.before = 2, .op = ReduceOp::Sum, .after = 2});
  CHECK(half(8) == GradientScale{.before = 4, .op = ReduceOp::Sum, .after = 2});
  CHECK(half(2.5) == GradientScale{.before = 1, .op = ReduceOp::Sum, .after = 2.5});
}

}  // namespace tessera
