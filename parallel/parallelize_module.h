#pragma once
// Applies tensor parallelism to a model by a plan of path patterns and styles.
//
//   parallelize_module(model, mesh["tp"], {{"layers.*.wq", ColwiseParallel()}, {"layers.*.wo", RowwiseParallel()}});
//
// Parameters keep their identity, so optimizers stay valid. All ranks call it with the same plan before fully_shard.
// Thread safety: one thread per rank. Source: torch/distributed/tensor/parallel/api.py.

#include <torch/nn/module.h>

#include "nn/hooks/module_ref.h"
#include "parallel/parallel_style.h"

namespace tessera {

/// Checks the whole plan, then applies it. Throws KeyError if a path has no match, ValueError if `tp_mesh` is not 1-D,
/// StateError if a module gets two styles, and the errors of the styles (parallel_style.h).
void parallelize_module(ModuleRef module, const DeviceMesh& tp_mesh, const ParallelPlan& plan,
                        DistributeOptions options = {});

}  // namespace tessera
