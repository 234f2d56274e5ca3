#pragma once
// Memory for a model that was built without any (nn/meta_device.h): for this rank's shards only.
//
//   fully_shard(model, {.mesh = mesh});                      // built under a MetaDeviceGuard
//   to_empty(*model, at::kCPU);
//   reset_parameters(*model);                                // or load the shards of a checkpoint
//
// Parameters keep their identity, so members, optimizers and ties stay valid.

#include <c10/core/Device.h>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// Allocates all parameters and buffers at and below `module` that are on the meta device. Others keep their values,
/// unlike in PyTorch. Throws ValueError, before it changes anything, if a unit's shards belong on another device, and
/// StateError for a parameter whose unit is that of a module above.
void to_empty(ModuleRef module, at::Device device);

}  // namespace tessera
