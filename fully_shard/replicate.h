#pragma once
// replicate: data parallelism without sharding (DDP), on the engine of fully_shard and with its hooks.
//
//   replicate(model, {.mesh = mesh});
//   loss(model(batch_of_this_rank)).backward();
//   optimizer.step();                         // the same on all ranks
//
// Between uses, each parameter is a DTensor, Replicate(), over its own memory, which forward and backward use in place:
// nothing is gathered, copied or freed, except for a cast to param_dtype. Gradients are averaged in all-reduces of up
// to bucket_cap_mb, which overlap with backward. Submodules may be units of their own, of replicate or fully_shard
// (docs/semantics.md); fsdp(module) is the handle to a unit of either.
//
// All ranks start from the same values: use the same seed or load the same state. check_replicas verifies it.
//
// Thread safety: one thread per rank; ranks may be threads of one process.
// Source: torch/distributed/_composable/replicate_with_fsdp.py.

#include <optional>
#include <vector>

#include "device_mesh/device_mesh.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/layout/policy.h"
#include "nn/hooks/module_ref.h"

namespace tessera {

struct ReplicateOptions {
  /// 1-D. Default: one axis over all ranks of the default process group.
  std::optional<DeviceMesh> mesh = std::nullopt;
  MixedPrecisionPolicy mp_policy = {};
  /// Parameters and gradients in the memory of the CPU; they go to the mesh's device for each forward and backward.
  std::optional<CPUOffloadPolicy> offload_policy = std::nullopt;
  /// Left as they are: their gradients are not reduced.
  std::vector<at::Tensor> ignored_params = {};
  /// MiB of gradients that share an all-reduce, at most, but for larger units or parameters; the first of a backward
  /// has 1 MiB at most. Sums do not depend on it. 0: each unit has an all-reduce of its own. All units of a model have
  /// the same, usually. As DistributedDataParallel.
  double bucket_cap_mb = 25;
};

/// Makes `module` one unit of replicated parameters: all below it that are in no unit yet. Collective.
/// Throws as fully_shard() does, and ValueError for a mesh that is not 1-D.
void replicate(ModuleRef module, ReplicateOptions options = {});

}  // namespace tessera
