#pragma once
// fully_shard: per-parameter sharding over the ranks of a data-parallel mesh (FSDP2, ZeRO-3).
//
//   Gpt model(config);                                   // declared with TESSERA_MODULE, the same on all ranks
//   torch::optim::AdamW optimizer(model->parameters());  // before or after sharding: both work
//   auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
//   for (auto& block : model->blocks()) {
//     fully_shard(block, {.mesh = mesh});                // bottom-up, one communication unit each ...
//   }
//   fully_shard(model, {.mesh = mesh});                  // ... then the remaining parameters, in the root unit
//   loss(model(batch_of_this_rank)).backward();          // gradients: averaged over the ranks, sharded
//   optimizer.step();                                    // updates this rank's rows only
//
// Between uses, each parameter is a DTensor, Shard(0), that holds this rank's rows. A unit's forward gathers its
// parameters with one all-gather, which overlaps with the previous unit's computation, and frees them afterwards. Its
// backward gathers them again and reduces their gradients with one reduce-scatter. Module members and optimizers stay
// valid.
//
// Requirements; docs/semantics.md has the details:
// - All ranks start from the same values.
// - forward returns every tensor that the loss depends on.
// - Parameters are written only while they are sharded.
//
// Thread safety: one thread per rank; ranks may be threads of one process.
// Source: torch/distributed/fsdp/_fully_shard/_fully_shard.py.

#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"
#include "dtensor/spec/placement.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/layout/all_gather_extension.h"
#include "fully_shard/layout/policy.h"
#include "nn/hooks/module_ref.h"

namespace tessera {

/// Whether a unit frees its parameters after forward: true, false, or a group size. With a group size, each group of
/// that many neighboring ranks keeps the parameters, sharded within the group, for backward's all-gather. It must
/// divide the size of the sharding axis.
class ReshardAfterForward {
 public:
  ReshardAfterForward(bool value) : is_on_(value) {}                // NOLINT: reads as the value that it is
  ReshardAfterForward(int group_size) : group_size_(group_size) {}  // NOLINT

  bool is_on() const { return is_on_; }
  std::optional<int64_t> group_size() const { return group_size_; }
  std::string to_string() const {
    return group_size_ ? std::to_string(*group_size_) : std::string(is_on_ ? "true" : "false");
  }

 private:
  bool is_on_ = true;
  std::optional<int64_t> group_size_;
};

/// Returns the dim on which to shard a parameter, or nullopt for dim 0.
using ShardPlacementFn = std::function<std::optional<Shard>(const at::Tensor& param)>;

struct FullyShardOptions {
  /// A 1-D mesh shards over its axis. A 2-D mesh (HSDP) shards over axis 1 and replicates over axis 0; gradients are
  /// all-reduced over axis 0 after the reduce-scatter. Default: one axis over all ranks of the default process group.
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// With false, keeps the parameters until backward is done. Default: false for the outermost unit, true for others.
  std::optional<ReshardAfterForward> reshard_after_forward = std::nullopt;
  MixedPrecisionPolicy mp_policy = {};
  /// Keeps shards and their gradients in CPU memory. Default: on the mesh's device.
  std::optional<CPUOffloadPolicy> offload_policy = std::nullopt;
  ShardPlacementFn shard_placement_fn = nullptr;
  /// Returns the tensors to all-gather instead of a parameter's shard. Equal on all ranks.
  AllGatherExtensionFn all_gather_extension_fn = nullptr;
  /// Parameters that stay unchanged and belong to no unit.
  std::vector<at::Tensor> ignored_params = {};
};

/// Makes `module` a unit that owns all parameters below it that belong to no unit yet. Collective: all ranks call it
/// with the same modules and options, inner modules first. If one rank fails, every rank throws:
/// - StateError if the module's type has no hook point (TESSERA_MODULE, tessera::nn, hooked()), the module is already a
///   unit, or a parameter has a gradient.
/// - ValueError or NotImplementedError if ranks disagree, or if parameters or meshes do not meet the requirements in
///   docs/semantics.md.
void fully_shard(ModuleRef module, FullyShardOptions options = {});

/// Makes several modules one unit. It is gathered when the first of them runs and freed when all have run.
void fully_shard(const std::vector<torch::nn::Module*>& modules, FullyShardOptions options = {});

}  // namespace tessera
