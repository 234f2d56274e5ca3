#pragma once
// Changes the dtype or device of existing units. Internal to this project; the public API is FSDP::to() (fsdp1/fsdp.h).
//
// Units are converted one at a time, each to a new ParamGroup. Parameters keep their identity, so module members,
// optimizers and ties stay valid. Each rank copies its shards and gradients; nothing is gathered.

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>

namespace tessera {

struct UnitConversion {
  std::optional<at::ScalarType> dtype = std::nullopt;  // for floating-point shards and their gradients
  std::optional<at::Device> device = std::nullopt;     // compute device; a GPU has an index
};

/// Converts all units at and below `module` as `request` returns. Collective over the units' meshes. Throws on every
/// rank of these meshes, before any change:
/// - the errors of `request`, of the functions in a unit's options, and of with_device_type().
/// - StateError if a unit is in the middle of an iteration, or a parameter was written while unsharded or was replaced.
/// - NotImplementedError for another device under tensor parallelism, or for another GPU.
void convert_units(torch::nn::Module& module, const std::string& where, const std::function<UnitConversion()>& request);

}  // namespace tessera
