#pragma once
// Prepares a unit's modules before the engine takes their parameters; internal to fsdp_construct.cpp.

#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"
#include "fsdp1/wrapper_state.h"
#include "fully_shard/composable_apis.h"

namespace tessera {

/// Returns the modules of a unit of `module`, without ignored ones.
std::vector<ManagedModule> modules_to_prepare(torch::nn::Module& module, const WrapScope& scope);

/// Gives meta tensors memory, calls param_init_fn once per module, and moves modules to device_id, except offloaded
/// parameters. Throws ValueError without param_init_fn, or for parameters on other devices.
void prepare_modules(const std::vector<ManagedModule>& modules, const WrapScope& scope, const FSDPOptions& options,
                     const std::string& where);

/// Broadcasts from rank 0: on a 2-D mesh, first of the replicas, then of the shards. All ranks must call it.
void sync_states(const std::vector<ManagedModule>& modules, const WrapScope& scope, const DeviceMesh& mesh);

/// Casts floating buffers to buffer_dtype if set, and records their previous dtypes.
void cast_buffers(const std::vector<ManagedModule>& modules, const WrapScope& scope, WrapperState& unit);

}  // namespace tessera
