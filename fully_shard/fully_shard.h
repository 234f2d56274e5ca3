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
// The last call matters: a parameter that is in no unit and is not ignored by one stays plain and trains on this rank's
// gradients alone, and nothing can tell that from a parameter that the program reduces by itself. check_replicas
// (fully_shard/replica_check.h) finds it. And a unit with no unit around it is an outermost one, which keeps its
// parameters after forward.
//
// Between uses each parameter is a DTensor, Shard(0), over this rank's rows. A unit's forward gathers its
// parameters (one all-gather) and frees them after; its backward gathers them again, and when it is done
// reduces their gradients (one reduce-scatter) into sharded DTensor gradients. The parameters' TensorImpls
// never change, only what they hold, so members, parameters() and optimizers stay valid.
//
// Communication overlaps with computation: before a unit computes, the all-gather of the next one is issued, in
// the order of the last iteration, and the reduction of a unit's gradients is waited for after the backward of
// the next. So two units' full parameters are in memory at one time, beside the outermost unit's. What a user may
// change from step to step (accumulation, prefetch, precision of sums) is in fsdp_module.h.
//
// On top of tensor parallelism: a parameter may be a DTensor on another axis (tp) of the same root mesh already. It is
// then sharded over both, and is the DTensor on tp again while it is unsharded (fully_shard/layout/stacked_spec.h):
//
//   auto mesh = init_device_mesh(at::kCPU, {2, 4}, {"dp", "tp"});
//   distribute_parameter(*model->up, "weight", mesh["tp"], {Shard(0)});    // tensor parallelism first
//   fully_shard(model, {.mesh = mesh["dp"]});                              // (Shard(0, 1), Shard(0)) on {dp: 2, tp: 4}
//
// A parameter that is still plain is sharded over dp alone, and nothing is reduced over tp for it: it is right where
// all ranks along tp compute the same gradient. Where each computes a term of it, distribute it as Replicate() first.
//
// Where ranks are processes that share memory ("shm"), shards of 64 KiB and more lie in it (comm/shm/shared_memory.h):
// the others read them there, and a unit is resharded when they have. The system counts such a page in every rank that
// has read it (VmRSS), though it is there once.
//
// Parameters of one unit may have several dtypes where all that are trained have one: frozen weights in bfloat16 beside
// adapters in float32, say. They are gathered together all the same. Which are frozen may change between iterations, as
// long as that holds (else backward throws StateError), and alike on all ranks.
//
// Every rank starts from its own values of its rows: build the model with the same seed on all ranks, or
// load the same state, before sharding. Buffers are left alone: each rank has its own. A model that is too large for
// one rank is built without memory, and only its shards get any (fully_shard/to_empty.h).
//
// A term of the loss may be made of parameters, as a penalty of their size, with DTensors where they are sharded:
// full_tensor(term) is the same on all ranks, also in its gradient. (Where a term has this rank's data as well, return
// the parameter from forward, or take full_tensor(p, Placements{Partial(ReduceOp::Avg)}).) Its gradient counts once,
// beside the average of the others, whatever was set for those; that of a parameter which is plain then, as the
// outermost unit's are, is averaged with them. Such a term is computed after the model's forward (else its gradient
// comes too late, and backward throws), or has a backward() of its own.
//
// A unit's forward may change an input in place, and the caller's tensor has the gradient of what it is then: hooks on
// it see all of that, retain_grad() and autograd::grad() the part that comes from outside of the unit. Where that
// tensor is a leaf or a view of another, shares memory with another input, or retains its gradient, such a change is a
// StateError that names the unit. An output that is an input, or a view of one, stays the caller's tensor or a view of
// it. An output that is a parameter of the unit, or a view of one, is returned as a copy, because the parameter's
// memory is freed. Outputs may be changed in place, also where several are views of one tensor; where their history
// cannot be that of one process (views with tensor hooks, an output that is a view which came in), backward is a
// StateError then. Where forward computes one output from another, as logits from features that it returns too, hooks
// and retain_grad() of the latter are set in forward: outside of it they would see the gradient that comes from there
// alone, and are a StateError of a backward in which the former takes part; torch::autograd::grad() to it gives that
// part.
//
// Writing a parameter in forward is a StateError, and so it is while the unit is unsharded otherwise, as the outermost
// one is from its forward to the end of its backward: at the next forward, backward or reshard(), of the ranks that
// wrote (writes through weight.data() go unnoticed and are lost). Write shards, or in summon_full_params
// (fsdp1/fsdp.h).
//
// A loss made of a tensor that forward keeps instead of returning is an error: a StateError, or one of libtorch where
// an op saved a view of a parameter, which is freed then. Exceptions: one that is computed from the unit's only output,
// where that output comes from an op of forward itself and is no view; and a parameter of the outermost unit, whose
// gradient is averaged with the others where the loss has an output of that unit too. Reading a view or a detach()ed
// copy of a full parameter once its unit is resharded is an error of libtorch too (with 2.11, undefined): clone() it.
//
// Ranks may use different outputs of a model: all gather and reduce alike. Not so where a checkpointed region calls a
// unit whose result no output depends on: then all ranks use the same outputs.
//
// A sparse gradient, as of an Embedding with sparse(true), is reduced, and arrives, as a dense one. A backward to
// chosen tensors (`inputs` of torch::autograd::backward()) does not see parameters that are sharded when it begins, and
// torch::autograd::grad() says that they were not used, or, where the outermost unit's are among them, throws
// NotImplementedError: requires_grad_(false) on the others instead.
//
// Thread safety: one thread a rank; ranks may be threads of one process.
// Names and meaning follow torch/distributed/fsdp/_fully_shard/_fully_shard.py.

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

/// Whether a unit frees its parameters after forward: true or false, or a number of ranks among which a share of the
/// full parameters stays, so that backward's all-gather runs among those neighbours only. The number divides that of
/// the sharding axis; 1 means false.
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

/// Makes `module` one unit: all parameters below it that no earlier fully_shard took are gathered and reduced
/// together. So call it on submodules first. All ranks call it with the same modules and options in the same order;
/// where they do not, or one of them cannot, every rank throws (one small collective finds out).
///
/// Throws StateError if the module's type has no hook point (TESSERA_MODULE, tessera::nn, hooked()), it is a
/// unit already, or a parameter has a gradient; ValueError if the mesh has more than two axes, a parameter has no dims
/// or is not contiguous, devices differ inside the unit, or dtypes of parameters that require a gradient, a parameter
/// is another unit's (shared between both, or wrapped top-down), or a DTensor that is Partial or on a mesh of another
/// root or of the same axes, or the ranks differ (names the first difference); NotImplementedError for a complex
/// parameter that requires a gradient.
void fully_shard(ModuleRef module, FullyShardOptions options = {});

/// Makes several modules one unit: fully_shard({&a, &b}). It is gathered when the first of them runs and freed when
/// all have run.
void fully_shard(const std::vector<torch::nn::Module*>& modules, FullyShardOptions options = {});

}  // namespace tessera
