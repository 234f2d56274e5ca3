// fully_shard and replicate on top of tensor parallelism equal one process: losses, gradients and parameters, in
// float64, so that only the order of additions may differ.

#include <ATen/TensorOperators.h>
#include <torch/optim/adam.h>

#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/tensor_parallel_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr Tolerance kTight{.rtol = 1e-9, .atol = 1e-11};

struct TowerSizes {
  int64_t dim = 17, hidden = 13;
};

/// What one run does with its tower after tensor parallelism.
using ShardOverMesh = std::function<void(Tower&, const DeviceMesh& dp)>;

Tower tower_in_double(const TowerSizes& sizes) {
  Tower tower(sizes.dim, sizes.hidden, 2);
  tower->to(at::kDouble);
  fill_parameters(*tower, 1);
  return tower;
}

at::Tensor loss_in_double(Tower& tower, int64_t batch) {
  return weighted_loss(tower(make_batch(static_cast<uint64_t>(batch), 3, 5).to(at::kDouble)));
}

/// `dp` and `tp` are parts of one mesh. Ranks along tp have the same batches.
void train_tower_beside_reference(const DeviceMesh& dp, const DeviceMesh& tp, const TowerSizes& sizes,
                                  const ShardOverMesh& shard) {
  auto reference = tower_in_double(sizes), sharded = tower_in_double(sizes);
  parallelize_tower(sharded, tp);
  torch::optim::Adam optimizer(sharded->parameters(), torch::optim::AdamOptions(1e-2));
  shard(sharded, dp);
  torch::optim::Adam reference_optimizer(reference->parameters(), torch::optim::AdamOptions(1e-2));
  const auto ranks = static_cast<int>(dp.size());
  for (int step = 0; step < 10; ++step) {
    const auto batch = [&](int64_t rank) { return 100 + step * ranks + rank; };
    at::Tensor expected;
    average_reference(*reference, ranks, [&](int rank) {
      auto loss = loss_in_double(reference, batch(rank));
      expected = rank == dp.local_rank() ? loss.detach() : expected;
      loss.backward();
    });
    optimizer.zero_grad();
    auto loss = loss_in_double(sharded, batch(dp.local_rank()));
    loss.backward();
    TESSERA_EXPECT(loss.item<double>() != 0);
    expect_close(loss.detach(), expected, kTight);
    check_sharded_parity(reference, sharded, {.tolerance = kTight});
    optimizer.step();
    reference_optimizer.step();
    check_sharded_parity(reference, sharded, {.tolerance = kTight});
  }
  const auto weight = full_tensor(sharded->blocks[0]->up->weight.detach());
  expect_close(weight, reference->blocks[0]->up->weight.detach(), kTight);
}

const ShardOverMesh shard_units = [](Tower& tower, const DeviceMesh& dp) { shard_tower(tower, {.mesh = dp}); };

}  // namespace

TEST_CASE("fully_shard over dp of parameters that are cut over tp equals one process", "[tensor_parallel]") {
  const auto shape = GENERATE(std::vector<int64_t>{2, 2}, std::vector<int64_t>{1, 2}, std::vector<int64_t>{2, 1},
                              std::vector<int64_t>{3, 2}, std::vector<int64_t>{2, 3});
  const auto sizes = GENERATE(TowerSizes{3, 9}, TowerSizes{16, 48}, TowerSizes{17, 51}, TowerSizes{3, 1});
  CAPTURE(shape, sizes.dim, sizes.hidden);
  run_ranks(static_cast<int>(shape[0] * shape[1]), [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, shape, {"dp", "tp"});
    train_tower_beside_reference(mesh["dp"], mesh["tp"], sizes, shard_units);
  });
}

TEST_CASE("the tensor-parallel axis may come first in the root mesh", "[tensor_parallel]") {
  run_ranks(6, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 3}, {"tp", "dp"});
    train_tower_beside_reference(mesh["dp"], mesh["tp"], {}, shard_units);
  });
}

TEST_CASE("units that have no element at all on some ranks of tp", "[tensor_parallel]") {
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    train_tower_beside_reference(mesh["dp"], mesh["tp"], {.dim = 3, .hidden = 1},
                                 [](Tower& tower, const DeviceMesh& dp) {
                                   fully_shard(tower->blocks[0]->up, {.mesh = dp});
                                   replicate(tower->blocks[1]->up, {.mesh = dp});
                                   fully_shard(tower, {.mesh = dp});
                                 });
  });
}

TEST_CASE("HSDP over replicas and shards on top of tensor parallelism equals one process", "[tensor_parallel]") {
  const auto shape = GENERATE(std::vector<int64_t>{2, 2, 2}, std::vector<int64_t>{2, 1, 2});
  const auto dim = GENERATE(int64_t{3}, int64_t{16}, int64_t{17});
  CAPTURE(shape, dim);
  run_ranks(static_cast<int>(shape[0] * shape[1] * shape[2]), [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, shape, {"replicate", "dp", "tp"});
    train_tower_beside_reference(mesh[{"replicate", "dp"}], mesh["tp"], {dim, 3 * dim}, shard_units);
  });
}

TEST_CASE("replicate, and both in one model, on top of tensor parallelism equal one process", "[tensor_parallel]") {
  const bool is_mixed = GENERATE(false, true);
  const auto shape = GENERATE(std::vector<int64_t>{2, 2}, std::vector<int64_t>{3, 2});
  CAPTURE(is_mixed, shape);
  run_ranks(static_cast<int>(shape[0] * shape[1]), [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, shape, {"dp", "tp"});
    train_tower_beside_reference(mesh["dp"], mesh["tp"], {}, [&](Tower& tower, const DeviceMesh& dp) {
      replicate(tower->blocks[0], {.mesh = dp});
      is_mixed ? fully_shard(tower->blocks[1], {.mesh = dp}) : replicate(tower->blocks[1], {.mesh = dp});
      replicate(tower, {.mesh = dp});
      expect_equal(to_string(placements(tower->blocks[0]->up->weight)), "(Replicate(), Shard(0))");
      expect_equal(to_string(placements(tower->blocks[1]->up->weight)),
                   is_mixed ? "(Shard(0, 1), Shard(0))" : "(Replicate(), Shard(0))");
    });
  });
}

TEST_CASE("reshard modes and shard dims on top of tensor parallelism equal one process", "[tensor_parallel]") {
  const int mode = GENERATE(0, 1, 2, 3, 4);
  CAPTURE(mode);
  run_ranks(8, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {4, 2}, {"dp", "tp"});
    const ShardPlacementFn last_dim = [](const at::Tensor& param) { return std::optional(Shard(param.dim() - 1)); };
    const FullyShardOptions options[] = {{.reshard_after_forward = true},
                                         {.reshard_after_forward = false},
                                         {.reshard_after_forward = 2},
                                         {.shard_placement_fn = last_dim},
                                         {.reshard_after_forward = 2, .shard_placement_fn = last_dim}};
    auto chosen = options[mode];
    train_tower_beside_reference(mesh["dp"], mesh["tp"], {}, [&](Tower& tower, const DeviceMesh& dp) {
      chosen.mesh = dp;
      shard_tower(tower, chosen);
    });
  });
}

}  // namespace tessera::testing
