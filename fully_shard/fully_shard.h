#pragma once
// fully_shard: per-parameter sharding over the ranks of a data-parallel mesh (FSDP2, ZeRO-3).
//
//   Gpt model(config);                                   // declared with TESSERA_MODULE, the same on all ranks
//   torch::optim::AdamW optimizer(model->parameters());  // before or after sharding: both work
//   auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
//   for (auto& block : model->blocks()) {
//     fully_shard(block, {.mesh = mesh});                // one unit of communication each, bottom-up ...
//   }
//   fully_shard(model, {.mesh = mesh});                  // ... and the rest of the parameters in the root's
//   loss(model(batch_of_this_rank)).backward();          // gradients: averages over the ranks, sharded
//   optimizer.step();                                    // on this rank's rows only
//
// Between uses, each parameter is a DTensor, Shard(0), that holds this rank's rows. A unit's forward gathers its
// parameters with one all-gather, while the unit before computes, and frees them afterwards. Its backward gathers them
// again and reduces their gradients with one reduce-scatter. Module members and optimizers stay valid.
//
// All ranks start from the same values; the loss depends on tensors that forward returns; parameters are written only
// while they are sharded. docs/semantics.md has the details.
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

/// Says whether a unit frees its parameters after forward: true, false, or the number of ranks that keep a share.
/// The number divides the size of the sharding axis; backward's all-gather runs among that many neighbors.
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

/// Gives the dim on which to shard a parameter; none: dim 0.
using ShardPlacementFn = std::function<std::optional<Shard>(const at::Tensor& param)>;

struct FullyShardOptions {
  /// 1-D: shard over it. 2-D (HSDP): shard over axis 1, keep replicas along axis 0, over which gradients are
  /// all-reduced after the reduce-scatter. Default: one axis over all ranks of the default process group.
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// false keeps the parameters until backward is done. Default: true, but false for the outermost unit.
  std::optional<ReshardAfterForward> reshard_after_forward = std::nullopt;
  MixedPrecisionPolicy mp_policy = {};
  /// Keeps shards and their gradients in the CPU's memory. Default: on the mesh's device.
  std::optional<CPUOffloadPolicy> offload_policy = std::nullopt;
  ShardPlacementFn shard_placement_fn = nullptr;
  /// Gives what is sent of a parameter in place of its shard, the same on all ranks.
  AllGatherExtensionFn all_gather_extension_fn = nullptr;
  /// Stay as they are, in no unit.
  std::vector<at::Tensor> ignored_params = {};
};

/// Makes `module` one unit of all parameters below it that are in no unit yet. Collective: all ranks call it with the
/// same modules and options, inner modules first; if one cannot, every rank throws.
///
/// Throws StateError if the module's type has no hook point (TESSERA_MODULE, tessera::nn, hooked()), the module is a
/// unit already, or a parameter has a gradient; ValueError or NotImplementedError for parameters and meshes that do not
/// meet the requirements in docs/semantics.md, or if ranks disagree.
void fully_shard(ModuleRef module, FullyShardOptions options = {});

/// Makes several modules one unit, gathered when the first of them runs and freed when all have run.
void fully_shard(const std::vector<torch::nn::Module*>& modules, FullyShardOptions options = {});

}  // namespace tessera
