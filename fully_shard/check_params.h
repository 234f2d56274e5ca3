#pragma once
// Collects the parameters of a unit and checks that fully_shard can shard them.

#include <string>
#include <vector>

#include "fully_shard/engine/param_group.h"
#include "fully_shard/fully_shard.h"

namespace tessera {

struct ManagedParam {
  std::string name;  // path relative to the unit's module: "attention.wq.weight"
  at::Tensor tensor;
};

/// Returns the parameters at and below `modules` that belong to no inner unit and are not `ignored`. Each appears once,
/// in registration order. With several modules, names begin with the module's index: "1.up.weight".
std::vector<ManagedParam> collect_managed_params(const std::vector<torch::nn::Module*>& modules,
                                                 const std::vector<at::Tensor>& ignored);

struct ParamRequirements {
  DeviceMesh mesh;
  const FullyShardOptions& options;
  std::string label;  // names the unit's modules
  std::string where;  // prefix of error messages: "fully_shard(Block)"
};

/// Returns each parameter with the dim to shard it on. Throws an Error that names the first unsupported parameter.
std::vector<ParamInfo> checked_params(const std::vector<ManagedParam>& params, const ParamRequirements& required);

/// Returns the communication and compute settings that the options give a parameter.
GatherItem gather_item(const ManagedParam& param, const FullyShardOptions& options);

/// Returns one line per parameter: name, dtype, sizes, placement.
std::vector<std::string> describe(const std::vector<ParamInfo>& params);

/// Returns the distinct meshes of the parameters that are DTensors but belong to no unit yet.
std::vector<DeviceMesh> tensor_parallel_meshes(const std::vector<ManagedParam>& params);

}  // namespace tessera
