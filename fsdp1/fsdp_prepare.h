#pragma once
// What is done to the modules of a unit before the engine takes their parameters: internal to fsdp_construct.cpp.

#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"
#include "fsdp1/wrapper_state.h"
#include "fully_shard/managed_params.h"

namespace tessera {

/// The modules of a unit of `module`, but for those that are ignored, which nothing is done to.
std::vector<ManagedModule> modules_to_prepare(torch::nn::Module& module, const WrapScope& scope);

/// Gives tensors on the meta device memory and lets param_init_fn fill it, once a module; moves modules to device_id,
/// except for parameters that are offloaded. Ignored tensors stay as they are. Throws ValueError where there is no such
/// function, and for a parameter on another device than the CPU and device_id.
void prepare_modules(const std::vector<ManagedModule>& modules, const WrapScope& scope, const FSDPOptions& options,
                     const std::string& where);

/// Parameters and buffers, but for those that are ignored, become those of rank 0 of each group in turn: over a mesh of
/// two axes first of the replicas, then of the shards. Collective.
void sync_states(const std::vector<ManagedModule>& modules, const WrapScope& scope, const DeviceMesh& mesh);

/// Floating buffers, but for those that are ignored, become buffer_dtype, if there is one; the unit remembers what they
/// were.
void cast_buffers(const std::vector<ManagedModule>& modules, const WrapScope& scope, WrapperState& unit);

}  // namespace tessera
