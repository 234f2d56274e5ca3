#include "tests/fully_shard/models/train_and_compare.h"

#include <torch/optim/adam.h>

#include "testing/expect.h"
#include "testing/parity.h"
#include "tests/fully_shard/models/small_models.h"

namespace tessera::testing {

void train_and_compare(int rank, int world_size, OptimizerBuilt built, const FullyShardOptions& options) {
  TrainOn where{.rank = rank, .world_size = world_size, .shard_ranks = world_size};
  if (options.mesh) {
    where.device = options.mesh->device_type();
    where.shard_ranks = static_cast<int>(options.mesh->shape().back());
  }
  train_and_compare(where, built, [&](Tower& tower) { shard_tower(tower, options); });
}

void train_and_compare(int rank, int world_size, OptimizerBuilt built, const std::function<void(Tower&)>& shard,
                       int shard_ranks) {
  train_and_compare({.rank = rank, .world_size = world_size, .shard_ranks = shard_ranks}, built, shard);
}

void train_and_compare(const TrainOn& where, OptimizerBuilt built, const std::function<void(Tower&)>& shard) {
  Tower reference(where.dim, where.hidden), sharded(where.dim, where.hidden);
  fill_parameters(*reference, 1);
  fill_parameters(*sharded, 1);
  reference->to(where.device);
  sharded->to(where.device);
  std::optional<torch::optim::Adam> optimizer;
  if (built == OptimizerBuilt::BeforeSharding) {
    optimizer.emplace(sharded->parameters(), torch::optim::AdamOptions(1e-2));
  }
  shard(sharded);
  if (built == OptimizerBuilt::AfterSharding) {
    optimizer.emplace(sharded->parameters(), torch::optim::AdamOptions(1e-2));
  }
  torch::optim::Adam reference_optimizer(reference->parameters(), torch::optim::AdamOptions(1e-2));

  for (int step = 0; step < kSteps; ++step) {
    const auto batch = [&](int r) { return make_batch(100 + step * where.world_size + r, 3, 5).to(where.device); };
    optimizer->zero_grad();
    at::Tensor reference_loss;
    const auto run_rank = [&](int r) {
      auto loss = weighted_loss(reference(batch(r)));
      reference_loss = r == where.rank ? loss.detach() : reference_loss;
      loss.backward();
    };
    average_reference(*reference, where.world_size, run_rank, where.shard_ranks);
    auto loss = weighted_loss(sharded(batch(where.rank)));
    loss.backward();

    expect_bit_equal(loss.detach(), reference_loss);
    TESSERA_EXPECT(loss.item<float>() != 0);
    check_sharded_parity(reference, sharded, {.tolerance = {.rtol = 0, .atol = 0}});
    optimizer->step();
    reference_optimizer.step();
    check_sharded_parity(reference, sharded, {.tolerance = {.rtol = 0, .atol = 0}});
  }
}

}  // namespace tessera::testing
