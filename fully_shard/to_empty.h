#pragma once
// Allocates memory for a model built on the meta device (nn/meta_device.h), only for this rank's shards.
//
//   fully_shard(model, {.mesh = mesh});                      // built under a MetaDeviceGuard
//   to_empty(*model, at::kCPU);
//   reset_parameters(*model);                                // or load a checkpoint
//
// Parameters keep their identity, so module members, optimizers and ties stay valid.

#include <c10/core/Device.h>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// Allocates all parameters and buffers at and below `module` that are on the meta device. Unlike in PyTorch, others
/// keep their values. Throws, before any change, ValueError if a unit's shards belong on another device, and StateError
/// if a parameter's unit is a module above.
void to_empty(ModuleRef module, at::Device device);

}  // namespace tessera
