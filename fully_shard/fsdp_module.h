#pragma once
// FSDPModule: the handle to a module after fully_shard or replicate, with its settings and state. Source: FSDPModule in
// torch/distributed/fsdp/_fully_shard/_fully_shard.py.
//
// Gradients of several micro-batches, reduced once:
//
//   for (int i = 0; i < n; ++i) {
//     fsdp(model).set_requires_gradient_sync(i == n - 1);
//     loss(model(batch[i])).backward();
//   }
//   optimizer.step();
//
// All ranks use the same settings, because they decide which collectives run. A setting holds from the unit's next
// forward or backward until it is set again.
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fully_shard/events/comm_overrides.h"
#include "fully_shard/events/sharded_state.h"
#include "nn/hooks/module_ref.h"

namespace tessera {

class FSDPState;

/// An unshard in flight. Copies mean the same one.
class UnshardHandle {
 public:
  UnshardHandle() = default;
  explicit UnshardHandle(std::weak_ptr<FSDPState> state) : state_(std::move(state)) {}
  /// Returns when the parameters are full tensors; a second call returns at once. The unit's next forward waits by
  /// itself.
  void wait();

 private:
  std::weak_ptr<FSDPState> state_;
};

/// A handle to a unit: a module that fully_shard or replicate was called on. Cheap to copy; the module must outlive it.
class FSDPModule {
 public:
  FSDPModule(torch::nn::Module& module, std::shared_ptr<FSDPState> state)
      : module_(&module), state_(std::move(state)) {}

  /// Gathers this unit's own parameters, not those of units below it. Collective; async_op only issues the all-gather.
  /// They stay until reshard(), or until the unit's next forward or backward frees them, and are for reading only.
  UnshardHandle unshard(bool async_op = false);
  /// Frees the full parameters; does nothing if they are sharded. Waits for ranks that still read this rank's shard.
  /// Throws StateError on a rank that changed a full parameter in place, since the change is lost.
  void reshard();

  /// Sets FullyShardOptions::reshard_after_forward of this unit and, with `recurse`, of all units below it.
  /// false also keeps the parameters after a forward without grad mode, so that evaluating many batches gathers once.
  /// Afterwards set true and call reshard_all() before parameters are written.
  void set_reshard_after_forward(bool value, bool recurse = true);
  /// false keeps the parameters unsharded after backward, which saves an all-gather per accumulated micro-batch.
  /// Call reshard() on each unit before the optimizer steps.
  void set_reshard_after_backward(bool value, bool recurse = true);
  /// false skips the gather in backward, for a unit whose backward does not need its parameters (an embedding).
  void set_unshard_in_backward(bool value);

  /// false lets gradients accumulate unsharded, without communication, until a backward with true reduces their sum.
  /// Until then grad() does not show them and zero_grad() does not clear them. Also sets set_requires_all_reduce().
  void set_requires_gradient_sync(bool value, bool recurse = true);
  /// false postpones the all-reduce over replicas (HSDP, replicate) to a backward with true; reduce-scatters still run.
  void set_requires_all_reduce(bool value, bool recurse = true);
  /// false, on the outermost unit, lets a backward end before its reductions do. The last backward must have true.
  void set_is_last_backward(bool value);
  /// Divides the summed gradients of this unit's own parameters by `factor` instead of by the number of ranks.
  /// Throws ValueError unless it is positive and finite.
  void set_gradient_divide_factor(double factor);
  /// Makes this unit's collectives only add; the division becomes a separate step.
  void set_force_sum_reduction_for_comms(bool value);

  /// Calls `hook` after the unit's own collectives, to reduce over an axis that the mesh does not have. Empty: none.
  /// It changes the flat gradient, in the reduce dtype, in place; all ranks call it in the same order. It runs once a
  /// backward, or once a bucket for a single unit of replicate. A parameter that no rank of the mesh used has zeros.
  /// On a GPU the current stream is one of the engine's (fully_shard/memory/stream_lane.h).
  void set_all_reduce_hook(std::function<void(const at::Tensor& flat_gradient)> hook);

  /// Replaces this unit's collectives, for another transport. Empty: the usual ones. They keep the contract of
  /// fully_shard/events/comm_overrides.h and must deliver the bytes unchanged.
  void set_custom_all_gather(AllGatherFn all_gather);
  void set_custom_reduce_scatter(ReduceScatterFn reduce_scatter);
  /// Of the replicas (HSDP, replicate).
  void set_custom_all_reduce(AllReduceFn all_reduce);

  /// Sets which units are gathered before this one's forward computes, the same on all ranks. Empty list: none.
  /// nullopt, the default: the unit that came next in the last forward. Throws ValueError if this unit is listed.
  void set_modules_to_forward_prefetch(std::optional<std::vector<FSDPModule>> modules);
  /// Does the same for backward. The default is the order of the last backward, or at first the reverse of forward.
  void set_modules_to_backward_prefetch(std::optional<std::vector<FSDPModule>> modules);

  /// Discards an iteration that threw: waits for collectives, reshards all units, drops unreduced gradients.
  /// Only for the outermost unit; throws StateError on another. The forward after a failed backward does it by itself.
  void reset_iter_state();

  /// Calls `observer` with every step of this unit and all below it, in order. It must not call into the model.
  void set_event_observer(const UnitObserver& observer);
  ShardedState unit_state() const;

  /// Bytes of unsharded parameters that this unit holds now: 0 while sharded.
  size_t unsharded_bytes() const;
  /// Number of this unit's own parameters.
  size_t num_parameters() const;

  /// The memory that this unit shares with all units of its tree, for unsharded parameters and collectives.
  struct MemoryStats {
    size_t held = 0;           // from the system, in bytes
    size_t acquired = 0;       // in use now
    size_t peak_acquired = 0;  // since reset_peak_memory()
  };
  MemoryStats memory_stats() const;
  void reset_peak_memory();

  /// Throws StateError unless an optimizer may step: all units below are sharded and idle, and a gradient is there.
  /// A stock optimizer silently skips undefined gradients.
  void check_ready_for_step() const;

 private:
  std::vector<std::weak_ptr<FSDPState>> targets(const std::vector<FSDPModule>& modules, const char* caller) const;

  torch::nn::Module* module_;
  std::shared_ptr<FSDPState> state_;
};

/// Reshards every unit that owns a parameter of `module`, at, below or above it. Call it before saving or loading.
/// Throws StateError as FSDPModule::reshard() does, and inside the forward or backward of one of these units.
void reshard_all(ModuleRef module);

/// Whether a parameter of `module` is a DTensor, or will be one after reshard_all: inside of a forward as outside of
/// it, so that ranks agree. One that FSDP::summon_full_params shows whole is none.
bool has_sharded_params(ModuleRef module);

/// reshard_all, whose StateError on one rank is one on all that have a part of a parameter of these units; `where`
/// begins that of the others, which names the rank. Collective over those ranks: of none where parameters are replicas.
void reshard_on_all_ranks(ModuleRef module, const std::string& where);

/// Throws StateError if neither fully_shard nor replicate was called on `module`.
FSDPModule fsdp(ModuleRef module);

}  // namespace tessera
