#pragma once
// Options for recomputing a checkpointed region, named like the arguments of torch.utils.checkpoint.checkpoint.

#include "activation_checkpoint/saved_ops.h"

namespace tessera {

struct CheckpointOptions {
  bool preserve_rng_state = true;  // draw the same random numbers again; copies 5 KB per generator
  bool early_stop = true;          // end the second forward once backward has what it needs
  bool determinism_check = true;   // compare shape, dtype, device and placements of saved tensors
  OpList ops_to_save = {};         // keep results of these ops (saved_ops.h), except in inner regions
};

}  // namespace tessera
