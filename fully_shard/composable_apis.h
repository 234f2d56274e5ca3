#pragma once
// Which data-parallel API a module has, and which modules a call of one takes.
//
//   replicate(model->blocks[0], {.mesh = mesh});
//   fully_shard(model->blocks[1], {.mesh = mesh});
//   composable_apis(*model->blocks[0]);    // {"replicate"}
//   managed_modules(*model);               // all but the two blocks and what is below them
//
// One module has one of both, which may differ from module to module of one model.
//
// Thread safety: for the thread that runs the rank's forward and backward.
// After torch/distributed/_composable/contract.py and _get_managed_modules in
// torch/distributed/fsdp/_fully_shard/_fsdp_init.py.

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// The APIs that were called on `module` itself: "fully_shard", "replicate", or none. Also on a module of a list that
/// became one unit.
std::vector<std::string> composable_apis(ModuleRef module);

/// The modules whose parameters the unit of `module` has, or will have if an API is called on it next: `module` and all
/// below it but inner units and what is below those. Each once, in order of registration, parents first. `module` owns
/// them.
std::vector<torch::nn::Module*> managed_modules(ModuleRef module);

}  // namespace tessera
