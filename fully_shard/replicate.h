#pragma once
// replicate: data parallelism without sharding (DDP), with the engine and hooks of fully_shard.
//
//   replicate(model, {.mesh = mesh});
//   loss(model(batch_of_this_rank)).backward();
//   optimizer.step();                         // the same update on all ranks
//
// Each parameter is a Replicate() DTensor, and forward and backward use its memory in place. All-reduces average the
// gradients and overlap with backward. All ranks must start from the same values; check_replicas verifies it.
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
  /// A 1-D mesh. Default: one axis over all ranks of the default process group.
  std::optional<DeviceMesh> mesh = std::nullopt;
  MixedPrecisionPolicy mp_policy = {};
  /// Keeps parameters and gradients in CPU memory.
  std::optional<CPUOffloadPolicy> offload_policy = std::nullopt;
  /// Parameters that stay unchanged; their gradients are not reduced.
  std::vector<at::Tensor> ignored_params = {};
  /// MiB of gradients per all-reduce, like DistributedDataParallel's. The first bucket of a backward is at most 1 MiB.
  /// A unit or parameter larger than that gets a larger bucket. With 0, each unit has its own all-reduce.
  double bucket_cap_mb = 25;
};

/// Makes `module` a unit that owns all parameters below it that belong to no unit yet. Collective. Throws like
/// fully_shard(), and ValueError if the mesh is not 1-D.
void replicate(ModuleRef module, ReplicateOptions options = {});

}  // namespace tessera
