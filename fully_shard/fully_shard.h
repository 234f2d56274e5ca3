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
// parameters with one all-gather and frees them afterwards. Its backward gathers them again, and then reduces their
// gradients with one reduce-scatter into sharded DTensor gradients. Module members, parameters() and optimizers stay
// valid.
//
// Communication overlaps computation: the all-gather of the next unit is issued before a unit computes, in the order of
// the last iteration. Two units' full parameters are in memory at a time, beside the outermost unit's, which keeps its
// parameters after forward. fsdp_module.h has what a program may change from step to step.
//
// A parameter may already be a DTensor on a tensor-parallel axis of the same root mesh (parallel/parallelize_module.h).
// A model too large for one rank is built without memory (fully_shard/to_empty.h).
//
// Requirements:
// - All ranks start from the same values (same seed or same loaded state); check_replicas verifies it.
// - The loss depends on tensors that forward returns, not on ones that it keeps as members.
// - Parameters are written only while they are sharded.
//
// docs/semantics.md has the rare cases: penalties on weights, frozen parameters, views and in-place changes of inputs
// and outputs, gradients to chosen tensors.
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
/// With a number, which divides the size of the sharding axis, backward's all-gather runs among that many neighbors.
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

/// The dim on which to shard a parameter; none: dim 0.
using ShardPlacementFn = std::function<std::optional<Shard>(const at::Tensor& param)>;

struct FullyShardOptions {
  /// 1-D: shard over it. 2-D (HSDP): shard over axis 1, keep replicas along axis 0; gradients are reduce-scattered
  /// over axis 1 and all-reduced over axis 0. Default: one axis over all ranks of the default process group.
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// Free the parameters after forward and gather them again for backward. false keeps them until backward
  /// is done: more memory, one all-gather less. Default: true, but false for the outermost unit, whose backward
  /// begins where its forward ended.
  std::optional<ReshardAfterForward> reshard_after_forward = std::nullopt;
  MixedPrecisionPolicy mp_policy = {};
  /// Shards and their gradients in the memory of the CPU. None: on the mesh's device.
  std::optional<CPUOffloadPolicy> offload_policy = std::nullopt;
  /// Sizes need not divide by the number of ranks, on any dim.
  ShardPlacementFn shard_placement_fn = nullptr;
  /// What is sent of a parameter in place of its shard. It gives the same on all ranks.
  AllGatherExtensionFn all_gather_extension_fn = nullptr;
  /// Left as they are: not sharded, gathered or reduced. Nor does a unit around this one take them: it takes nothing of
  /// modules that are units.
  std::vector<at::Tensor> ignored_params = {};
};

/// Makes `module` one unit: all parameters below it that are in no unit yet are gathered and reduced together.
/// Collective: all ranks call it with the same modules and options, inner modules first; if one cannot, every rank
/// throws.
///
/// Throws:
/// - StateError if the module's type has no hook point (TESSERA_MODULE, tessera::nn, hooked()), the module is a unit
///   already, or a parameter has a gradient.
/// - ValueError if the mesh has more than two axes, or the ranks disagree (names the first difference).
/// - ValueError if a parameter has no dims, is not contiguous, belongs to another unit, or is a DTensor that is Partial
///   or on a mesh of another root or the same axes.
/// - ValueError if devices differ inside the unit, or dtypes of trained parameters do.
/// - NotImplementedError for a complex parameter that requires a gradient.
void fully_shard(ModuleRef module, FullyShardOptions options = {});

/// Makes several modules one unit, gathered when the first of them runs and freed when all have run.
void fully_shard(const std::vector<torch::nn::Module*>& modules, FullyShardOptions options = {});

}  // namespace tessera
