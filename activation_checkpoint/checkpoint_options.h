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

/// Which activations of a module backward recomputes.
enum class Recompute {
  None,
  Selective,  // all except results of matrix products and attention
  Full,       // all except the module's inputs
};

/// Returns "none", "selective" or "full".
const char* to_string(Recompute recompute);

/// Returns options for checkpoint_module. `recompute` must not be None.
CheckpointOptions checkpoint_options(Recompute recompute);

}  // namespace tessera
