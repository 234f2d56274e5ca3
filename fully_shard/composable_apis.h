#pragma once
// Finds the data-parallel API applied to a module, and the modules that one unit manages.
//
//   composable_apis(*model->blocks[0]);    // {"replicate"}
//   managed_modules(*model);               // all modules except inner units and their descendants
//
// Source: torch/distributed/_composable/contract.py and _get_managed_modules in
// torch/distributed/fsdp/_fully_shard/_fsdp_init.py.

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// Returns the API that was applied to `module` itself: "fully_shard" or "replicate", or an empty list.
std::vector<std::string> composable_apis(ModuleRef module);

struct ManagedModule {
  std::string name;  // path relative to the unit's module; "" for the module itself
  torch::nn::Module* module;
};

/// Returns the modules whose parameters a unit of `module` manages (or would manage): all except inner units and their
/// descendants. Each appears once, in registration order, parents first.
std::vector<torch::nn::Module*> managed_modules(ModuleRef module);
std::vector<ManagedModule> named_managed_modules(torch::nn::Module& module);

}  // namespace tessera
