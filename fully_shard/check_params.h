#pragma once
// The parameters of a unit, and the checks of what fully_shard requires of them.

#include <string>
#include <vector>

#include "fully_shard/engine/param_group.h"
#include "fully_shard/fully_shard.h"

namespace tessera {

struct ManagedParam {
  std::string name;  // path below the unit's module: "attention.wq.weight"
  at::Tensor tensor;
};

/// Returns the parameters at and below `modules` that are in no inner unit and not `ignored`, each once, in order of
/// registration. Names of several modules begin with the module's place: "1.up.weight".
std::vector<ManagedParam> collect_managed_params(const std::vector<torch::nn::Module*>& modules,
                                                 const std::vector<at::Tensor>& ignored);

struct ParamRequirements {
  DeviceMesh mesh;
  const FullyShardOptions& options;
  std::string label;  // the unit's modules
  std::string where;  // begins messages: "fully_shard(Block)"
};

/// Returns the parameters with the dim on which each is sharded. Throws an Error that names the first one that cannot
/// be.
std::vector<ParamInfo> checked_params(const std::vector<ManagedParam>& params, const ParamRequirements& required);

/// Returns how the options have a parameter sent and computed with.
GatherItem gather_item(const ManagedParam& param, const FullyShardOptions& options);

/// Returns one line a parameter: name, dtype, sizes, placement.
std::vector<std::string> describe(const std::vector<ParamInfo>& params);

/// Returns the meshes of parameters that are DTensors and in no unit yet, each once.
std::vector<DeviceMesh> tensor_parallel_meshes(const std::vector<ManagedParam>& params);

}  // namespace tessera
