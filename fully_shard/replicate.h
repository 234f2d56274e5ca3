#pragma once
// replicate: data parallelism without sharding (DDP), on the engine of fully_shard and with its hooks.
//
//   replicate(model, {.mesh = mesh});
//   loss(model(batch_of_this_rank)).backward();
//   optimizer.step();                         // the same on all ranks
//
// Each parameter is a DTensor, Replicate(), whose memory forward and backward use in place. Gradients are averaged in
// all-reduces that overlap with backward. All ranks start from the same values; check_replicas verifies it.
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
  /// Keeps parameters and gradients in the CPU's memory.
  std::optional<CPUOffloadPolicy> offload_policy = std::nullopt;
  /// Stay as they are: their gradients are not reduced.
  std::vector<at::Tensor> ignored_params = {};
  /// MiB of gradients that share an all-reduce, at most 1 for the first of a backward, except for larger units or
  /// parameters. 0: each unit has its own. As DistributedDataParallel.
  double bucket_cap_mb = 25;
};

/// Makes `module` one unit of all parameters below it that are in no unit yet. Collective. Throws as fully_shard()
/// does, and ValueError for a mesh that is not 1-D.
void replicate(ModuleRef module, ReplicateOptions options = {});

}  // namespace tessera
