// The exact order of collectives, computation and frees, for each way to prefetch.

#include <ATen/TensorOperators.h>

#include <algorithm>

#include "fully_shard/fully_shard.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using Events = std::vector<std::string>;

class EventLog {
 public:
  template <class Holder>
  explicit EventLog(const Holder& module) {
    fsdp(module).set_event_observer([this](const FSDPEvent& event) { events_.push_back(to_string(event)); });
  }
  Events take() { return std::exchange(events_, {}); }

 private:
  Events events_;
};

/// `a`, then `b`, then ...
Events joined(std::initializer_list<Events> parts) {
  Events all;
  for (const auto& part : parts) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

/// Two units after one tensor, of which the later one is left first in backward.
struct ForkImpl : torch::nn::Module {
  explicit ForkImpl(bool has_op)
      : in(register_module("in", nn::Linear(5, 17))),
        early(register_module("early", Block(17, 13))),
        late(register_module("late", Block(17, 13))),
        has_op(has_op) {}

  at::Tensor forward(at::Tensor x) {
    const auto h = in(x);
    const auto by_early = early(has_op ? h * 2 : h);
    return by_early + late(h);
  }

  nn::Linear in;
  Block early, late;
  bool has_op;
};
TESSERA_MODULE(Fork);

const Events kForwardWithoutPrefetch = {
    "gather root",    "unshard root",   "forward root",   "gather block0",  "unshard block0",
    "forward block0", "reshard block0", "gather block1",  "unshard block1", "forward block1",
    "reshard block1", "gather block2",  "unshard block2", "forward block2", "reshard block2",
};

// Each gather is issued before the computation that it overlaps with.
const Events kForwardInRecordedOrder = {
    "gather root",    "unshard root",   "gather block0",  "forward root",   "unshard block0",
    "gather block1",  "forward block0", "reshard block0", "unshard block1", "gather block2",
    "forward block1", "reshard block1", "unshard block2", "forward block2", "reshard block2",
};

// A reduction overlaps with the backward of the next unit, and its buffer goes to that unit's.
const Events kBackwardInRecordedOrder = {
    "gather block2",       "backward root",         "unshard block2",        "gather block1",  "backward block2",
    "reshard block2",      "reduce_scatter block2", "unshard block1",        "gather block0",  "backward block1",
    "reshard block1",      "reduced block2",        "reduce_scatter block1", "unshard block0", "backward block0",
    "reshard block0",      "reduced block1",        "reduce_scatter block0", "reshard root",   "reduced block0",
    "reduce_scatter root", "reduced root",
};

const Events kBackwardWithoutPrefetch = {
    "backward root",         "gather block2",         "unshard block2",        "backward block2", "reshard block2",
    "reduce_scatter block2", "gather block1",         "unshard block1",        "backward block1", "reshard block1",
    "reduced block2",        "reduce_scatter block1", "gather block0",         "unshard block0",  "backward block0",
    "reshard block0",        "reduced block1",        "reduce_scatter block0", "reshard root",    "reduced block0",
    "reduce_scatter root",   "reduced root",
};

}  // namespace

TEST_CASE("the first iteration prefetches in backward, later ones in forward too, in the recorded order") {
  run_ranks(2, [](int rank) {
    Tower tower;
    shard_tower(tower);
    EventLog log(tower);
    auto loss = loss_of(tower, rank);
    expect_equal(log.take(), kForwardWithoutPrefetch);
    loss.backward();
    expect_equal(log.take(), kBackwardInRecordedOrder);
    for (int step = 1; step < 3; ++step) {
      loss = loss_of(tower, rank);
      expect_equal(log.take(), kForwardInRecordedOrder);
      loss.backward();
      expect_equal(log.take(), kBackwardInRecordedOrder);
    }
  });
}

TEST_CASE("a root that reshards after forward is gathered first in backward") {
  run_ranks(2, [](int rank) {
    Tower tower;
    shard_tower(tower, {.reshard_after_forward = true});
    EventLog log(tower);
    for (int step = 0; step < 2; ++step) {
      auto loss = loss_of(tower, rank);
      expect_equal(log.take(),
                   joined({step == 0 ? kForwardWithoutPrefetch : kForwardInRecordedOrder, {"reshard root"}}));
      loss.backward();
      expect_equal(log.take(), joined({{"gather root", "unshard root"}, kBackwardInRecordedOrder}));
    }
  });
}

TEST_CASE("empty lists of modules to prefetch mean none") {
  run_ranks(2, [](int rank) {
    Tower tower;
    shard_tower(tower);
    const auto prefetch_nothing = [](FSDPModule module) {
      module.set_modules_to_forward_prefetch(std::vector<FSDPModule>{});
      module.set_modules_to_backward_prefetch(std::vector<FSDPModule>{});
    };
    prefetch_nothing(fsdp(tower));
    for (auto& block : tower->blocks) {
      prefetch_nothing(fsdp(block));
    }
    EventLog log(tower);
    for (int step = 0; step < 2; ++step) {
      loss_of(tower, rank).backward();
      expect_equal(log.take(), joined({kForwardWithoutPrefetch, kBackwardWithoutPrefetch}));
    }
  });
}

TEST_CASE("explicit lists come before the recorded order, and may reach further ahead") {
  run_ranks(2, [](int rank) {
    Tower tower;
    shard_tower(tower);
    const auto block = [&](size_t i) { return fsdp(tower->blocks[i]); };
    fsdp(tower).set_modules_to_forward_prefetch({{block(0), block(1)}});
    block(0).set_modules_to_forward_prefetch({{block(2)}});
    block(1).set_modules_to_forward_prefetch(std::vector<FSDPModule>{});
    fsdp(tower).set_modules_to_backward_prefetch({{block(2), block(1)}});
    block(2).set_modules_to_backward_prefetch({{block(0)}});
    EventLog log(tower);
    for (int step = 0; step < 2; ++step) {
      auto loss = loss_of(tower, rank);
      expect_equal(log.take(),
                   Events{"gather root", "unshard root", "gather block0", "gather block1", "forward root",
                          "unshard block0", "gather block2", "forward block0", "reshard block0", "unshard block1",
                          "forward block1", "reshard block1", "unshard block2", "forward block2", "reshard block2"});
      loss.backward();
      expect_equal(
          log.take(),
          Events{"gather block2",       "gather block1",  "backward root",         "unshard block2", "gather block0",
                 "backward block2",     "reshard block2", "reduce_scatter block2", "unshard block1", "backward block1",
                 "reshard block1",      "reduced block2", "reduce_scatter block1", "unshard block0", "backward block0",
                 "reshard block0",      "reduced block1", "reduce_scatter block0", "reshard root",   "reduced block0",
                 "reduce_scatter root", "reduced root"});
    }
  });
}

TEST_CASE("with replicas an all-reduce follows each reduce-scatter, one unit later") {
  run_ranks(4, [](int rank) {
    Tower tower;
    shard_tower(tower, {.mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"})});
    auto loss = loss_of(tower, rank);
    EventLog log(tower);
    loss.backward();
    expect_equal(log.take(),
                 Events{"gather block2",         "backward root",     "unshard block2",        "gather block1",
                        "backward block2",       "reshard block2",    "reduce_scatter block2", "unshard block1",
                        "gather block0",         "backward block1",   "reshard block1",        "all_reduce block2",
                        "reduce_scatter block1", "unshard block0",    "backward block0",       "reshard block0",
                        "reduced block2",        "all_reduce block1", "reduce_scatter block0", "reshard root",
                        "reduced block1",        "all_reduce block0", "reduce_scatter root",   "reduced block0",
                        "all_reduce root",       "reduced root"});
  });
}

TEST_CASE("a unit that was prefetched but not called is dropped when forward ends, and not expected again") {
  run_ranks(2, [](int) {
    Tower tower;
    shard_tower(tower);
    const at::NoGradGuard no_grad;
    const auto x = make_batch(1, 3, 5);
    tower(x);
    tower->blocks.pop_back();  // the module is still registered, so it is still a unit
    EventLog log(tower);
    tower(x);
    expect_equal(log.take(),
                 Events{"gather root", "unshard root", "gather block0", "forward root", "unshard block0",
                        "gather block1", "forward block0", "reshard block0", "unshard block1", "gather block2",
                        "forward block1", "reshard block1", "reshard root", "drop block2"});
    tower(x);
    expect_equal(log.take(), Events{"gather root", "unshard root", "gather block0", "forward root", "unshard block0",
                                    "gather block1", "forward block0", "reshard block0", "unshard block1",
                                    "forward block1", "reshard block1", "reshard root"});
  });
}

TEST_CASE("several modules that are one unit are gathered once, forward and backward") {
  run_ranks(2, [](int rank) {
    Tower tower;
    fully_shard({&*tower->blocks[0], &*tower->blocks[1]});
    fully_shard(tower);
    EventLog log(tower);
    auto loss = loss_of(tower, rank);
    expect_equal(log.take(), Events{"gather root", "unshard root", "forward root", "gather block0", "unshard block0",
                                    "forward block0", "forward block0", "reshard block0"});
    loss.backward();
    expect_equal(log.take(), Events{"gather block0", "backward root", "unshard block0", "backward block0",
                                    "backward block0", "reshard block0", "reduce_scatter block0", "reshard root",
                                    "reduced block0", "reduce_scatter root", "reduced root"});
  });
}

TEST_CASE("modules of an outermost unit may have units inside, whichever of them runs first") {
  const size_t first = GENERATE(0u, 1u);
  run_ranks(2, [&](int rank) {
    Tower reference, tower;
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    for (size_t i = 0; i < 2; ++i) {
      fully_shard(tower->blocks[i]->up);
    }
    fully_shard({&*tower->blocks[0], &*tower->blocks[1]});
    EventLog log(tower->blocks[1]);
    const auto loss_of = [&](Tower& from, int r) {
      return weighted_loss(from->blocks[1 - first](from->blocks[first](make_batch(static_cast<uint64_t>(r), 3, 17))));
    };
    for (int step = 0; step < 2; ++step) {
      tower->zero_grad();
      average_reference(*reference, 2, [&](int r) { loss_of(reference, r).backward(); });
      loss_of(tower, rank).backward();
      const auto events = log.take();
      TESSERA_EXPECT(std::ranges::find(events, "unshard 1.up") != events.end());
      TESSERA_EXPECT(std::ranges::find(events, "reduced root") != events.end());
      for (size_t i = 0; i < 2; ++i) {
        check_sharded_parity(*reference->blocks[i], *tower->blocks[i]);
      }
    }
  });
}

TEST_CASE("backward leaves a unit before another one begins, whatever used its input first") {
  const bool has_op = GENERATE(false, true);
  run_ranks(2, [&](int rank) {
    Fork reference(has_op), fork(has_op);
    fill_parameters(*reference, 1);
    fill_parameters(*fork, 1);
    fully_shard(fork->early);
    fully_shard(fork->late);
    fully_shard(fork);
    EventLog log(fork);
    const auto loss_of = [](Fork& from, int r) {
      return weighted_loss(from(make_batch(static_cast<uint64_t>(r), 3, 5)));
    };
    for (int step = 0; step < 2; ++step) {
      fork->zero_grad();
      average_reference(*reference, 2, [&](int r) { loss_of(reference, r).backward(); });
      auto loss = loss_of(fork, rank);
      log.take();
      loss.backward();
      const auto events = log.take();
      const auto left = std::ranges::find(events, "reshard late"),
                 entered = std::ranges::find(events, "backward early");
      TESSERA_EXPECT(left < entered && entered != events.end());
      check_sharded_parity(*reference, *fork);
    }
  });
}

}  // namespace tessera::testing
