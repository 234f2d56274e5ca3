#pragma once
// How a checkpointed region is computed again.

#include "activation_checkpoint/saved_ops.h"

namespace tessera {

/// As the arguments of torch.utils.checkpoint.checkpoint.
struct CheckpointOptions {
  /// The second forward draws the same random numbers as the first. Costs a copy of the generators' states (5 KB each).
  bool preserve_rng_state = true;
  /// The second forward ends as soon as it has computed all that backward needs, so that the last ops of the region
  /// are not computed again.
  bool early_stop = true;
  /// Compares what both forwards save (shape, dtype, device, placements), so that a forward that does something else
  /// the second time is an error. Without it only the number of tensors is compared.
  bool determinism_check = true;
  /// Ops whose results are kept and not computed again. Those of a region inside of this one are that one's own.
  OpList ops_to_save = {};
};

}  // namespace tessera
