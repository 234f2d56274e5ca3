#pragma once
// Another dtype, or another device, for units after fully_shard or replicate made them. Internal to this project: the
// API is FSDP::to() (fsdp1/fsdp.h).
//
// Each unit gets a new ParamGroup, one unit after the other: parameters, and with them the members of modules,
// optimizers and ties, stay the same objects; shards and gradients are copied on each rank, and none is gathered.

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>

namespace tessera {

struct UnitConversion {
  std::optional<at::ScalarType> dtype = std::nullopt;  // of floating shards and their gradients
  std::optional<at::Device> device = std::nullopt;     // to compute on; a GPU has an index
};

/// Converts all units at and below `module` as `request` says, which may throw. Collective over the units' meshes.
/// Throws on every rank of these, before any change: what `request` or a function of the unit's options throws; what
/// with_device_type() does; StateError for a unit in the middle of an iteration, and where a parameter was written
/// while full, or replaced; and NotImplementedError for another device under tensor parallelism, or another GPU.
void convert_units(torch::nn::Module& module, const std::string& where, const std::function<UnitConversion()>& request);

}  // namespace tessera
