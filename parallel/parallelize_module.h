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
// Parameters become DTensors and keep their identity, so members, parameters() and optimizers stay valid. Rank 0 of
// the mesh has the values that count (src_data_rank). Apply fully_shard over the data-parallel axis after this.
//
// A plain input is taken to be the same on all ranks of the mesh, unless a style says that it is cut (input_layouts):
// give them one batch, that of mesh.local_rank("dp"). Of different ones the results are sums that mean nothing, which
// nothing finds.
//
// All ranks of the mesh must call with the same plan. Everything is checked before anything is changed, also that no
// two styles of the plan place one parameter differently, be it tied or below a module that is SequenceParallel. Of
// styles of one's own that holds as far as their check() says; what it leaves out is found when they are applied.
// Thread safety: one thread a rank.
// After parallelize_module in torch/distributed/tensor/parallel/api.py; unlike there, a path that matches nothing is
// an error.

#include <torch/nn/module.h>

#include "nn/hooks/module_ref.h"
#include "parallel/parallel_style.h"

namespace tessera {

/// Throws KeyError for a path that matches no module (it lists close ones); ValueError if `tp_mesh` has not one axis;
/// StateError if a module would get two styles in this plan, or has one of an earlier call, which is known where its
/// type has a hook point, or a style needs hooks and the type has none; and what styles throw for modules that they
/// cannot be applied to.
void parallelize_module(ModuleRef module, const DeviceMesh& tp_mesh, const ParallelPlan& plan,
                        DistributeOptions options = {});

}  // namespace tessera
