// Sharded training equals one process: losses, gradients and parameters over 10 Adam steps.

#include <torch/optim/adam.h>

#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "tests/fully_shard/models/train_and_compare.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("fully_shard equals one process bit for bit over 10 Adam steps") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const auto built = GENERATE(OptimizerBuilt::BeforeSharding, OptimizerBuilt::AfterSharding);
  CAPTURE(world_size, built == OptimizerBuilt::BeforeSharding);
  run_ranks(world_size, [&](int rank) { train_and_compare(rank, world_size, built, {}); });
}

TEST_CASE("fully_shard equals one process whether or not units reshard after forward") {
  const bool reshard_after_forward = GENERATE(true, false);
  run_ranks(3, [&](int rank) {
    train_and_compare(rank, 3, OptimizerBuilt::AfterSharding, {.reshard_after_forward = reshard_after_forward});
  });
}

TEST_CASE("a 2-D mesh shards over its second axis and averages over the replicas of the first") {
  const std::vector<int64_t> shape = GENERATE(std::vector<int64_t>{2, 2}, std::vector<int64_t>{1, 3},
                                              std::vector<int64_t>{3, 1}, std::vector<int64_t>{2, 1});
  const auto world_size = static_cast<int>(shape[0] * shape[1]);
  CAPTURE(shape);
  run_ranks(world_size, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, shape, {"replicate", "shard"});
    train_and_compare(rank, world_size, OptimizerBuilt::AfterSharding, {.mesh = mesh});
  });
}

TEST_CASE("parameters may be sharded on another dim than the first, evenly or not") {
  const int world_size = GENERATE(2, 3, 4);
  run_ranks(world_size, [&](int rank) {
    const ShardPlacementFn last_dim = [](const at::Tensor& param) { return std::optional(Shard(param.dim() - 1)); };
    train_and_compare(rank, world_size, OptimizerBuilt::BeforeSharding, {.shard_placement_fn = last_dim});
  });
}

TEST_CASE("after forward a share may stay among fewer ranks") {
  const int group_size = GENERATE(1, 2, 4);
  run_ranks(4, [&](int rank) {
    train_and_compare(rank, 4, OptimizerBuilt::AfterSharding, {.reshard_after_forward = group_size});
  });
}

TEST_CASE("fully_shard on the whole batch at once equals one process within tolerance") {
  const int world_size = GENERATE(2, 3, 4);
  run_ranks(world_size, [&](int rank) {
    Tower reference, sharded;
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    shard_tower(sharded);
    torch::optim::Adam optimizer(sharded->parameters(), torch::optim::AdamOptions(1e-2));
    torch::optim::Adam reference_optimizer(reference->parameters(), torch::optim::AdamOptions(1e-2));
    const auto loss_of = [](const at::Tensor& out) { return out.square().mean() + out.mean(); };
    for (int step = 0; step < kSteps; ++step) {
      const auto whole = make_batch(200 + static_cast<uint64_t>(step), 2 * world_size, 5);
      optimizer.zero_grad();
      reference_optimizer.zero_grad();
      loss_of(reference(whole)).backward();
      loss_of(sharded(whole.narrow(0, 2 * rank, 2))).backward();
      check_sharded_parity(reference, sharded, {.tolerance = {.rtol = 1e-3, .atol = 1e-5}});
      optimizer.step();
      reference_optimizer.step();
    }
  });
}

}  // namespace tessera::testing
