#pragma once
// Which parameters a call of fully_shard takes.

#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera {

struct ManagedParam {
  std::string name;  // path below the unit's module: "attention.wq.weight"
  at::Tensor tensor;
};

/// The parameters at and below `module` that are not below an inner fully_shard unit, in order of registration;
/// one that is registered twice is listed once. Undefined ones are left out.
std::vector<ManagedParam> collect_managed_params(torch::nn::Module& module);

}  // namespace tessera
