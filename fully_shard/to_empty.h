#pragma once
// Memory for a model that was built without any (nn/meta_device.h): for this rank's shards only.
//
//   {
//     const MetaDeviceGuard on_meta;
//     model = Gpt(config);
//   }
//   torch::optim::AdamW optimizer(model->parameters());     // here, or after any of the lines below
//   fully_shard(model, {.mesh = mesh});                      // also on top of parallelize_module
//   to_empty(*model, at::kCPU);
//   tessera::manual_seed(0);
//   reset_parameters(*model);                                // or load the shards of a checkpoint
//
// Parameters keep their identity, so members, optimizers and ties stay. A forward before it throws on every rank and
// names a parameter.
//
// As Module.to_empty of Python, with one difference: tensors that have memory are left alone, so buffers that were
// computed keep their values.

#include <c10/core/Device.h>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// Gives all parameters and buffers at and below `module` that are on the meta device memory on `device`. Their values
/// are undefined. Parameters that need no sharding, and DTensors of tensor parallelism, come along. No communication.
/// Throws ValueError, before it changes anything, if a unit's shards belong on another device: that of its mesh, or
/// with an offload_policy the CPU; StateError for a parameter whose unit is that of a module above.
void to_empty(ModuleRef module, at::Device device);

}  // namespace tessera
