#pragma once
// The data-parallel API of a module, and the modules that a call of one takes.
//
//   composable_apis(*model->blocks[0]);    // {"replicate"}
//   managed_modules(*model);               // all but the units inside and what is below them
//
// After torch/distributed/_composable/contract.py and _get_managed_modules in
// torch/distributed/fsdp/_fully_shard/_fsdp_init.py.

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// Returns the API that was called on `module` itself: "fully_shard", "replicate", or none.
std::vector<std::string> composable_apis(ModuleRef module);

struct ManagedModule {
  std::string name;  // path below the unit's module; "" for itself
  torch::nn::Module* module;
};

/// Returns the modules whose parameters the unit of `module` has, or would have: all but inner units and what is below
/// those. Each once, in order of registration, parents first.
std::vector<torch::nn::Module*> managed_modules(ModuleRef module);
std::vector<ManagedModule> named_managed_modules(torch::nn::Module& module);

}  // namespace tessera
