#pragma once
// Batch norms whose statistics in training are those of the batches of all data-parallel ranks, for batches that are
// too small a rank. What SyncBatchNorm is in PyTorch (torch/nn/modules/batchnorm.py).
//
//   auto mesh = tessera::init_device_mesh(at::kCPU, {4}, {"dp"});
//   Net net;                                           // whose layers are tessera::nn::BatchNorm1d, 2d, 3d or hooked()
//   tessera::convert_sync_batchnorm(net, mesh);
//   tessera::fully_shard(net, {.mesh = mesh});
//
// Each forward sends two numbers a channel, in float64, and each backward two more. Ranks may have batches of different
// sizes, or none ([0, C, ...]), but call each layer equally often and run its backward. Gradients of weight and bias
// are those of this rank's items, to be averaged by fully_shard or replicate. Training equals that of one process on
// all batches if each rank's loss is a mean over equally many items. docs/semantics.md has eval mode and checkpointing.
//
// Thread safety: forward and backward are for the thread that runs the rank's.

#include "device_mesh/device_mesh.h"
#include "nn/hooks/module_ref.h"

namespace tessera {

/// Makes the batch norms at and below `module` take their statistics over all ranks of `mesh`, before or after
/// fully_shard. Throws StateError if a batch norm has no hook point or is converted already. Its forward and backward
/// throw:
/// - ValueError on every rank if all of them together have one value a channel (on the CPU).
/// - ValueError for a number of channels that is not the layer's.
/// - StateError if the layer by itself is a checkpointed module.
/// - NotImplementedError for create_graph.
void convert_sync_batchnorm(ModuleRef module, const DeviceMesh& mesh);

}  // namespace tessera
