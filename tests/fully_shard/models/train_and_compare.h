#pragma once
// The central oracle: sharded training against one process, bit for bit.

#include <functional>

#include "fully_shard/fully_shard.h"
#include "tests/fully_shard/models/small_models.h"

namespace tessera::testing {

inline constexpr int kSteps = 10;

enum class OptimizerBuilt { BeforeSharding, AfterSharding };

/// Trains a sharded and a plain tower for kSteps of Adam on the same batches and compares losses, gradients and
/// parameters after every backward and step. Bit for bit, because the reference adds the ranks' gradients in the
/// order of the ranks, as the collectives do, also those of a 2-D mesh. On the device of options.mesh, else on the CPU.
/// Collective; throws ExpectationError.
void train_and_compare(int rank, int world_size, OptimizerBuilt built, const FullyShardOptions& options);

/// The same with a tower that `shard` makes data-parallel, averaging over `shard_ranks` neighbours first.
void train_and_compare(int rank, int world_size, OptimizerBuilt built, const std::function<void(Tower&)>& shard,
                       int shard_ranks);

struct TrainOn {
  int rank;
  int world_size;
  c10::DeviceType device = c10::kCPU;
  int shard_ranks;
  /// Of the tower.
  int64_t dim = 17, hidden = 13;
};

/// The same on a device, or with a larger tower.
void train_and_compare(const TrainOn& where, OptimizerBuilt built, const std::function<void(Tower&)>& shard);

}  // namespace tessera::testing
