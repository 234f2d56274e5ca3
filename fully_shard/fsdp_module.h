#pragma once
// FSDPModule: the handle to a unit, a module after fully_shard or replicate, with its settings and state.
//
//   for (int i = 0; i < n; ++i) {                              // gradients of several micro-batches, reduced once
//     fsdp(model).set_requires_gradient_sync(i == n - 1);
//     loss(model(batch[i])).backward();
//   }
//   optimizer.step();
//
// All ranks use the same settings, which hold from the unit's next forward or backward on.
//
// Thread safety: for the thread that runs the rank's forward and backward.
// Source: torch/distributed/fsdp/_fully_shard/_fully_shard.py.

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
  /// Returns when the parameters are full tensors. The unit's next forward waits by itself.
  void wait();

 private:
  std::weak_ptr<FSDPState> state_;
};

/// A handle to a unit. Cheap to copy; the module must outlive it.
class FSDPModule {
 public:
  FSDPModule(torch::nn::Module& module, std::shared_ptr<FSDPState> state)
      : module_(&module), state_(std::move(state)) {}

  /// Gathers this unit's own parameters, for reading only, until reshard() or the unit's next forward or backward frees
  /// them. Collective; async_op only issues the all-gather.
  UnshardHandle unshard(bool async_op = false);
  /// Frees the full parameters, if there are any. Throws StateError on a rank that changed one in place.
  void reshard();

  /// Sets FullyShardOptions::reshard_after_forward of this unit and, with `recurse`, of all units below it. false keeps
  /// the parameters without grad mode, too: set true and call reshard_all() before they are written.
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
  /// Divides this unit's summed gradients by a positive factor instead of the number of ranks; else throws ValueError.
  void set_gradient_divide_factor(double factor);
  /// Makes this unit's collectives only add; the division becomes a separate step.
  void set_force_sum_reduction_for_comms(bool value);

  /// Calls `hook` after the unit's own collectives, to reduce over an axis that the mesh does not have. Empty: none. It
  /// changes the flat gradient in place, once a backward or bucket, on the engine's stream on a GPU.
  void set_all_reduce_hook(std::function<void(const at::Tensor& flat_gradient)> hook);

  /// Replaces this unit's collectives. Empty: the usual ones. The contract is in fully_shard/events/comm_overrides.h.
  void set_custom_all_gather(AllGatherFn all_gather);
  void set_custom_reduce_scatter(ReduceScatterFn reduce_scatter);
  void set_custom_all_reduce(AllReduceFn all_reduce);

  /// Sets which units are gathered before this one computes, the same on all ranks. Empty list: none. nullopt, the
  /// default: by the last iteration, or in backward the reverse of forward. Throws ValueError for this unit itself.
  void set_modules_to_forward_prefetch(std::optional<std::vector<FSDPModule>> modules);
  void set_modules_to_backward_prefetch(std::optional<std::vector<FSDPModule>> modules);

  /// Discards an iteration that threw, as the next forward does by itself. Only on the outermost unit (else
  /// StateError).
  void reset_iter_state();

  /// Calls `observer` with every step of this unit and all below it, in order. It must not call into the model.
  void set_event_observer(const UnitObserver& observer);
  ShardedState unit_state() const;

  /// Bytes of unsharded parameters that this unit holds now: 0 while sharded.
  size_t unsharded_bytes() const;
  /// Number of this unit's own parameters.
  size_t num_parameters() const;

  /// Bytes of the memory that all units of a tree share, for unsharded parameters and collectives.
  struct MemoryStats {
    size_t held = 0;           // from the system, in bytes
    size_t acquired = 0;       // in use now
    size_t peak_acquired = 0;  // since reset_peak_memory()
  };
  MemoryStats memory_stats() const;
  void reset_peak_memory();

  /// Throws StateError unless an optimizer may step: all units below are sharded and idle, and a gradient is there.
  void check_ready_for_step() const;

 private:
  std::optional<std::vector<std::weak_ptr<FSDPState>>> targets(const std::optional<std::vector<FSDPModule>>& modules,
                                                               const char* caller) const;

  torch::nn::Module* module_;
  std::shared_ptr<FSDPState> state_;
};

/// Reshards every unit that owns a parameter of `module`, at, below or above it, before saving or loading. Throws
/// StateError like reshard(), and inside the forward or backward of one of these units.
void reshard_all(ModuleRef module);

/// Returns whether a parameter of `module` is a DTensor, or is one after reshard_all(). The same on all ranks.
bool has_sharded_params(ModuleRef module);

/// Calls reshard_all(), whose StateError on one rank becomes one on all that share these units' parameters. `where`
/// begins that of the others. Collective over those ranks.
void reshard_on_all_ranks(ModuleRef module, const std::string& where);

/// Throws StateError if neither fully_shard nor replicate was called on `module`.
FSDPModule fsdp(ModuleRef module);
/// Returns nullopt in that case.
std::optional<FSDPModule> find_fsdp(ModuleRef module);

}  // namespace tessera
