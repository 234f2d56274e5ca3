#pragma once
// Batch norm with training statistics over all data-parallel ranks, like PyTorch's SyncBatchNorm. docs/semantics.md has
// costs and uneven batches. Thread safety: forward and backward are for the rank's thread.

#include "device_mesh/device_mesh.h"
#include "nn/hooks/module_ref.h"

namespace tessera {

/// Converts the batch norms at and below `module`. Throws StateError without a hook point or if already converted.
/// Forward and backward throw ValueError for a wrong number of channels or (on the CPU, on every rank) one value per
/// channel in total, StateError if only the layer is checkpointed, and NotImplementedError for create_graph.
void convert_sync_batchnorm(ModuleRef module, const DeviceMesh& mesh);

}  // namespace tessera
