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
// Between uses each parameter is a DTensor, Shard(0), over this rank's rows. A unit's forward gathers its
// parameters (one all-gather) and frees them after; its backward gathers them again, and when it is done
// reduces their gradients (one reduce-scatter) into sharded DTensor gradients. The parameters' TensorImpls
// never change, only what they hold, so members, parameters() and optimizers stay valid.
//
// Every rank starts from its own values of its rows: build the model with the same seed on all ranks, or
// load the same state, before sharding. Buffers are left alone: each rank has its own.
//
// Thread safety: one thread a rank; ranks may be threads of one process.
// Names and meaning follow torch/distributed/fsdp/_fully_shard/_fully_shard.py.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>

#include "device_mesh/device_mesh.h"
#include "fully_shard/policy.h"

namespace tessera {

struct FullyShardOptions {
  /// The 1-D mesh to shard over. Default: one axis over all ranks of the default process group.
  std::optional<DeviceMesh> mesh = std::nullopt;
  /// Free the parameters after forward and gather them again for backward. false keeps them until backward
  /// is done: more memory, one all-gather less. Default: true, but false for the root, whose backward
  /// begins where its forward ended.
  std::optional<bool> reshard_after_forward = std::nullopt;
  MixedPrecisionPolicy mp_policy = {};
};

/// Makes `module` one unit: all parameters below it that no earlier fully_shard took are gathered and reduced
/// together. So call it on submodules first. All ranks must call it in the same order.
///
/// Throws StateError if the module's type has no hook point (TESSERA_MODULE, tessera::nn, hooked()) or it is a
/// unit already; ValueError if the mesh is not 1-D, a parameter has no dims, dtypes or devices differ inside
/// the unit, or a parameter is a DTensor already (of another unit: shared between both, or wrapped top-down).
void fully_shard(torch::nn::Module& module, FullyShardOptions options = {});

template <class Impl>
void fully_shard(const torch::nn::ModuleHolder<Impl>& module, FullyShardOptions options = {}) {
  fully_shard(static_cast<torch::nn::Module&>(*module.ptr()), std::move(options));
}
template <class Impl>
requires std::is_base_of_v<torch::nn::Module, Impl>
void fully_shard(const std::shared_ptr<Impl>& module, FullyShardOptions options = {}) {
  fully_shard(static_cast<torch::nn::Module&>(*module), std::move(options));
}

class FSDPState;

/// A handle to a module that fully_shard was called on. Cheap to copy; the module must outlive it.
class FSDPModule {
 public:
  FSDPModule(torch::nn::Module& module, std::shared_ptr<FSDPState> state)
      : module_(&module), state_(std::move(state)) {}

  /// Gathers this unit's own parameters (not those of units below it). They stay until reshard() or the
  /// unit's next forward or backward frees them; changes made to them meanwhile are lost.
  void unshard();
  /// Back to shards; does nothing if they are sharded.
  void reshard();
  /// See FullyShardOptions; for this unit, and with `recurse` for all units below it.
  void set_reshard_after_forward(bool value, bool recurse = true);

  /// Bytes of unsharded parameters that this unit holds now: 0 while sharded.
  size_t unsharded_bytes() const;
  /// Number of this unit's own parameters.
  size_t num_parameters() const;

  /// Throws StateError unless every unit from here down is between iterations with gradients to step on: no
  /// forward that awaits its backward, and a gradient on at least one parameter. A stock optimizer passes
  /// over undefined gradients without a word, so call it where step() might come before backward().
  void check_ready_for_step() const;

 private:
  torch::nn::Module* module_;
  std::shared_ptr<FSDPState> state_;
};

/// Throws StateError if fully_shard was not called on `module`.
FSDPModule fsdp(torch::nn::Module& module);

template <class Impl>
FSDPModule fsdp(const torch::nn::ModuleHolder<Impl>& module) {
  return fsdp(static_cast<torch::nn::Module&>(*module.ptr()));
}

}  // namespace tessera
