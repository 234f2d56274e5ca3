// Graphs that a rank keeps, and others do not, and of which it runs backward never, or later.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/sgd.h>

#include <functional>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using ShardTower = std::function<void(Tower&)>;

struct TrainedPair {
  Tower reference, sharded;

  explicit TrainedPair(const ShardTower& shard) {
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    shard(sharded);
  }

  /// A step of both.
  void train(int rank, int world_size, int step) {
    sharded->zero_grad();
    average_reference(*reference, world_size, [&](int r) { loss_of(reference, 10 * step + r).backward(); });
    loss_of(sharded, 10 * step + rank).backward();
    check_sharded_parity(reference, sharded, kExact);
    for (auto* tower : {&reference, &sharded}) {
      torch::optim::SGD((*tower)->parameters(), 0.1).step();
    }
  }
};

void shard_blocks(Tower& tower) {
  shard_tower(tower);
}

/// Two blocks that are one unit, and the rest; their parameters stay until backward.
void shard_a_list(Tower& tower) {
  fully_shard({&*tower->blocks[0], &*tower->blocks[1]}, {.reshard_after_forward = false});
  fully_shard(tower);
}

/// Parts of the gradients go while backward goes on.
void replicate_in_parts(Tower& tower) {
  replicate(tower, {.bucket_cap_mb = 0.001});
}

}  // namespace

TEST_CASE("a rank that keeps the loss of a validation forward trains on with the others", "[kept_graphs]") {
  const int world_size = GENERATE(2, 3);
  const auto shard = GENERATE(as<ShardTower>(), shard_blocks, shard_a_list, replicate_in_parts);
  run_ranks(world_size, [&](int rank) {
    TrainedPair pair(shard);
    std::vector<at::Tensor> kept;
    for (int step = 0; step < 4; ++step) {
      pair.train(rank, world_size, step);
      auto loss = loss_of(pair.sharded, 1000 + step);  // differentiable
      if (rank == 0) {
        kept.push_back(std::move(loss));
      }
    }
    expect_equal(kept.size(), rank == 0 ? 4u : 0u);
  });
}

TEST_CASE("what a unit frees after forward does not depend on the graphs that a rank keeps", "[kept_graphs]") {
  run_ranks(2, [](int rank) {
    TrainedPair pair(shard_a_list);
    auto loss = loss_of(pair.sharded, rank);
    if (rank != 0) {
      loss = at::Tensor();
    }
    {
      const at::NoGradGuard no_grad;
      pair.sharded->blocks[1](make_batch(1, 3, 17));
    }
    TESSERA_EXPECT(fsdp(pair.sharded->blocks[0]).unit_state() == ShardedState::Sharded);
    pair.train(rank, 2, 0);
  });
}

TEST_CASE("a backward through several forwards reduces each unit once, also when it is run again", "[kept_graphs]") {
  const bool is_list = GENERATE(false, true);
  run_ranks(2, [&](int rank) {
    TrainedPair pair(is_list ? shard_a_list : shard_blocks);
    const auto both = [](Tower& tower, int r) { return loss_of(tower, r) + loss_of(tower, 10 + r); };
    const auto loss = both(pair.sharded, rank);
    for (int i = 0; i < 2; ++i) {
      pair.sharded->zero_grad();
      reset_comm_stats();
      loss.backward({}, /*retain_graph=*/true);
      expect_equal(comm_stats()[Collective::ReduceScatter].calls, is_list ? 2 : 4);
      average_reference(*pair.reference, 2, [&](int r) { both(pair.reference, r).backward(); });
      check_sharded_parity(pair.reference, pair.sharded, kExact);
    }
  });
}

}  // namespace tessera::testing
