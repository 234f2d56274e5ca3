#pragma once
// Which modules and parameters a call of fully_shard takes.

#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera {

struct ManagedParam {
  std::string name;  // path below the unit's module: "attention.wq.weight"
  at::Tensor tensor;
};

struct ManagedModule {
  std::string name;  // path below the unit's module; "" for itself
  torch::nn::Module* module;
};

/// `module` and the modules below it that are not below an inner fully_shard unit, each once, in order of registration,
/// parents first.
std::vector<ManagedModule> collect_managed_modules(torch::nn::Module& module);

/// The parameters at and below `modules` that are not below an inner fully_shard unit and not among `ignored`, in order
/// of registration; one that is registered twice is listed once. Undefined ones are left out. Where there are several
/// modules, names begin with the module's place: "1.up.weight".
std::vector<ManagedParam> collect_managed_params(const std::vector<torch::nn::Module*>& modules,
                                                 const std::vector<at::Tensor>& ignored = {});

}  // namespace tessera
