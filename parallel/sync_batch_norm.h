#pragma once
// Batch norms whose statistics in training are those of the batches of all data-parallel ranks, for batches that are
// too small a rank. What SyncBatchNorm is in PyTorch (torch/nn/modules/batchnorm.py).
//
//   auto mesh = tessera::init_device_mesh(at::kCPU, {4}, {"dp"});
//   Net net;                                           // whose layers are tessera::nn::BatchNorm1d, 2d, 3d or hooked()
//   tessera::convert_sync_batchnorm(net, mesh);
//   tessera::fully_shard(net, {.mesh = mesh});
//
// Each forward sends two numbers a channel, in float64, and each backward two more
// (dtensor/ops/norm/batch_statistics.h). Ranks may have batches of different sizes, or none ([0, C, ...]); every rank
// calls each of the layers equally often, and runs the backward of each. Gradients of weight and bias are those of this
// rank's items, to be averaged over the ranks as other gradients are, by fully_shard or replicate; the gradient of the
// input has what the ranks' losses, added up, say of it. So training is that of one process on all batches, if each
// rank's loss is a mean over equally many items. Running statistics are equal on all ranks.
//
// A layer in a region that checkpoint_module computes again counts a batch twice in its running statistics, as a batch
// norm does without ranks. In eval mode nothing is exchanged: without running statistics a rank takes those of its
// own batch, and may evaluate alone. An input that is a DTensor goes by the rule of batch norm: statistics over the
// whole of it.
//
// Thread safety: forward and backward are for the thread that runs the rank's.

#include "device_mesh/device_mesh.h"
#include "nn/hooks/module_ref.h"

namespace tessera {

/// Lets the batch norms at and below `module` take their statistics over the ranks of `mesh`, all its axes. A model
/// without batch norm stays as it is. Before or after fully_shard; layers belong to one mesh, once and for all.
///
/// Errors: StateError if a batch norm has no hook point, as torch::nn's own, or is converted already; in forward
/// ValueError on every rank if all of them together have one value a channel (on the CPU), ValueError for a number of
/// channels that is not the layer's, StateError where the layer by itself is a checkpointed module; in backward
/// NotImplementedError with create_graph.
void convert_sync_batchnorm(ModuleRef module, const DeviceMesh& mesh);

}  // namespace tessera
