// FullyShardedDataParallel: when units are gathered, computed with and freed.

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("rows 40, 62: backward prefetch decides when the next unit is gathered") {
  run_ranks(2, [](int) {
    const auto events_of = [](std::optional<BackwardPrefetch> prefetch) {
      const FullyShardedDataParallel model(make_tower(),
                                           {.auto_wrap_policy = block_policy(), .backward_prefetch = prefetch});
      TESSERA_EXPECT(model.options().backward_prefetch == prefetch);
      std::vector<std::string> events;
      for (int step = 0; step < 2; ++step) {
        const auto loss = weighted_loss(model(batch_of(get_rank())));
        events.clear();
        fsdp(*model).set_event_observer([&](const FSDPEvent& event) {
          const auto text = to_string(event);
          if (text == "gather block0" || text == "backward block1" || text == "reduce_scatter block1" ||
              text == "backward block0") {
            events.push_back(text);
          }
        });
        loss.backward();
      }
      return events;
    };
    using Events = std::vector<std::string>;
    expect_equal(events_of(BackwardPrefetch::BACKWARD_PRE),
                 Events{"gather block0", "backward block1", "reduce_scatter block1", "backward block0"});
    expect_equal(events_of(BackwardPrefetch::BACKWARD_POST),
                 Events{"backward block1", "gather block0", "reduce_scatter block1", "backward block0"});
    expect_equal(events_of(std::nullopt),
                 Events{"backward block1", "reduce_scatter block1", "gather block0", "backward block0"});
  });
}

TEST_CASE("rows 40, 68: forward prefetch gathers the next unit before this one computes") {
  run_ranks(2, [](int) {
    for (const bool prefetches : {false, true}) {
      const FullyShardedDataParallel model(make_tower(),
                                           {.auto_wrap_policy = block_policy(), .forward_prefetch = prefetches});
      TESSERA_EXPECT(model.options().forward_prefetch == prefetches);
      weighted_loss(model(batch_of(get_rank()))).backward();
      std::vector<std::string> events;
      fsdp(*model).set_event_observer([&](const FSDPEvent& event) { events.push_back(to_string(event)); });
      const at::NoGradGuard no_grad;
      model(batch_of(get_rank()));
      const auto place = [&](const std::string& event) {
        return std::find(events.begin(), events.end(), event) - events.begin();
      };
      expect_equal(place("gather block1") < place("forward block0"), prefetches);
    }
  });
}

TEST_CASE("row 69: two units' full parameters at most are in memory, beside the root's") {
  const bool limits = GENERATE(true, false);
  run_ranks(2, [=](int) {
    Tower tower(8, 6, 6);
    fill_parameters(*tower, 7);
    const FullyShardedDataParallel model(
        tower, {.auto_wrap_policy = block_policy(), .forward_prefetch = true, .limit_all_gathers = limits});
    TESSERA_EXPECT(model.options().limit_all_gathers == limits);
    for (int step = 0; step < 2; ++step) {
      size_t most = 0;
      for (auto& block : model->blocks) {
        find_hook_point(*block)->register_forward_pre_hook([&](HookPoint&, TensorRefs) {
          size_t full = 0;
          for (auto& other : model->blocks) {
            full += fsdp(other).unit_state() != ShardedState::Sharded;
          }
          most = std::max(most, full);
        });
      }
      weighted_loss(model(batch_of(get_rank()))).backward();
      expect_equal(most, step == 0 ? 1u : 2u);
    }
  });
}

TEST_CASE("row 88: forward: unshard, compute, reshard, and the first unit belongs to the root") {
  run_ranks(2, [](int) {
    const auto model = make_model({.forward_prefetch = true});
    run_backward(model);
    std::vector<std::string> events;
    fsdp(*model).set_event_observer([&](const FSDPEvent& event) { events.push_back(to_string(event)); });
    const at::NoGradGuard no_grad;
    model(batch_of(get_rank()));
    expect_equal(events,
                 std::vector<std::string>{"gather root", "unshard root", "gather block0", "forward root",
                                          "unshard block0", "gather block1", "forward block0", "reshard block0",
                                          "unshard block1", "forward block1", "reshard block1", "reshard root"});
  });
}

TEST_CASE("row 112: a unit that was unsharded by hand is not gathered again by its forward") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    run_backward(model);
    reset_comm_stats();
    auto handle = model.unshard(/*async_op=*/true);
    handle.wait();
    handle.wait();
    TESSERA_EXPECT(!is_dtensor(model->in->weight));
    expect_equal(comm_stats()[Collective::AllGather].calls, 1);
    const at::NoGradGuard no_grad;
    model(batch_of(get_rank()));
    expect_equal(comm_stats()[Collective::AllGather].calls, 3);
  });
}

}  // namespace tessera::testing
