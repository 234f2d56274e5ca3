#pragma once
// Tensor parallelism by a plan: which modules of a model get which style.
//
//   auto mesh = init_device_mesh(at::kCPU, {2, 4}, {"dp", "tp"});
//   Transformer model(config);                                   // declared with TESSERA_MODULE, tessera::nn layers
//   torch::optim::AdamW optimizer(model->parameters());          // before or after: both work
//   parallelize_module(model, mesh["tp"],
//                      {{"layers.*.wq", ColwiseParallel()},      // * is any name of one component
//                       {"layers.*.wo", RowwiseParallel({.output_layouts = Shard(1)})},
//                       {"layers.*.norm", SequenceParallel()}});
//   parallelize_module(linear, mesh["tp"], ColwiseParallel());   // one style for the module itself; in a plan: ""
//
// Parameters become DTensors and keep their identity, so members, parameters() and optimizers stay valid. Rank 0 of the
// mesh has the values that count (src_data_rank). Apply fully_shard over the data-parallel axis after this.
//
// Give all ranks of the mesh the same batch, that of mesh.local_rank("dp"): plain inputs are taken to be equal, unless
// a style's input_layouts say otherwise, and this is not checked.
//
// All ranks of the mesh call with the same plan. Everything is checked before anything is changed.
// Thread safety: one thread per rank.
// Source: torch/distributed/tensor/parallel/api.py; here a path that matches nothing is an error.

#include <torch/nn/module.h>

#include "nn/hooks/module_ref.h"
#include "parallel/parallel_style.h"

namespace tessera {

/// Applies the styles of `plan` to the modules whose paths match. Throws:
/// - KeyError for a path that matches no module (lists close ones).
/// - ValueError if `tp_mesh` does not have one axis, or two styles place one parameter differently.
/// - StateError if a module would get two styles, or needs hooks and its type has no hook point.
/// - What a style throws for a module that it cannot be applied to.
void parallelize_module(ModuleRef module, const DeviceMesh& tp_mesh, const ParallelPlan& plan,
                        DistributeOptions options = {});

}  // namespace tessera
