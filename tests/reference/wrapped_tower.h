#pragma once
// What the tests of FullyShardedDataParallel wrap: a tower of two blocks, with the same values on every rank.

#include <string>
#include <vector>

#include "fsdp1/fsdp.h"
#include "tests/fully_shard/models/small_models.h"
#include "tests/reference/strategies.h"

namespace tessera::testing {

using TowerModel = FullyShardedDataParallel<Tower::Impl>;

/// 14 parameters; elements: in 48, each block 110 (up 54, down 56), norm 16, out 27.
Tower make_tower();
WrapPolicy block_policy();
/// The tower, each block a unit.
TowerModel make_model(FSDPOptions options = {});

/// Paths of the modules below `module` that are wrapped, "" for itself; parents first.
std::vector<std::string> unit_names(torch::nn::Module& module);

at::Tensor batch_of(int rank);
void run_backward(const TowerModel& model);  // of this rank's batch
/// The plain tower with the gradients of all ranks' batches, averaged.
Tower reference_after_backward();
/// Runs backward, and compares the gradients with the reference's.
void expect_gradients_of_average(const TowerModel& model);

}  // namespace tessera::testing
