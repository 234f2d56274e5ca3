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
// Parameters keep their identity, so members, optimizers and ties stay valid. A forward before to_empty() throws on
// every rank. Tensors that have memory already are left alone, unlike in PyTorch, so computed buffers keep their
// values.

#include <c10/core/Device.h>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// Allocates all parameters and buffers at and below `module` that are on the meta device. Their values are undefined.
/// No communication. Throws, before it changes anything:
/// - ValueError if a unit's shards belong on another device: that of its mesh, or the CPU with an offload_policy.
/// - StateError for a parameter whose unit is that of a module above.
void to_empty(ModuleRef module, at::Device device);

}  // namespace tessera
