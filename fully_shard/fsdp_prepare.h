#pragma once
// What is done to the modules of a unit before the engine takes their parameters: internal to fsdp_construct.cpp.

#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"
#include "fully_shard/fsdp_unit.h"
#include "fully_shard/managed_params.h"

namespace tessera {

/// Gives tensors on the meta device memory and lets param_init_fn fill it, once a module; moves modules to device_id,
/// except for parameters that are offloaded. Throws ValueError where there is no such function, and for a parameter on
/// another device than the CPU and device_id.
void prepare_modules(const std::vector<ManagedModule>& modules, const FSDPOptions& options, const std::string& where);

/// Parameters, but for those that are ignored, and buffers become those of rank 0 of each group in turn: over a mesh of
/// two axes first of the replicas, then of the shards. Collective.
void sync_states(const std::vector<ManagedModule>& modules, const WrapScope& scope, const DeviceMesh& mesh);

/// Floating buffers become buffer_dtype, if there is one; the unit remembers what they were.
void cast_buffers(const std::vector<ManagedModule>& modules, FSDPUnit& unit);

}  // namespace tessera
