#include "tests/fully_shard/train_and_compare.h"

#include <torch/optim/adam.h>

#include "testing/expect.h"
#include "testing/parity.h"
#include "tests/fully_shard/small_models.h"

namespace tessera::testing {

void train_and_compare(int rank, int world_size, OptimizerBuilt built, const FullyShardOptions& options) {
  const auto shard_ranks = static_cast<int>(options.mesh ? options.mesh->shape().back() : world_size);
  train_and_compare(
      rank, world_size, built, [&](Tower& tower) { shard_tower(tower, options); }, shard_ranks);
}

void train_and_compare(int rank, int world_size, OptimizerBuilt built, const std::function<void(Tower&)>& shard,
                       int shard_ranks) {
  Tower reference, sharded;
  fill_parameters(*reference, 1);
  fill_parameters(*sharded, 1);
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
    const auto batch = [&](int r) { return make_batch(100 + step * world_size + r, 3, 5); };
    optimizer->zero_grad();
    at::Tensor reference_loss;
    const auto run_rank = [&](int r) {
      auto loss = weighted_loss(reference(batch(r)));
      reference_loss = r == rank ? loss.detach() : reference_loss;
      loss.backward();
    };
    average_reference(*reference, world_size, run_rank, shard_ranks);
    auto loss = weighted_loss(sharded(batch(rank)));
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
