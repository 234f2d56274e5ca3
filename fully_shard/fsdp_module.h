#pragma once
// FSDPModule: a handle to a module that fully_shard or replicate made a unit, with its settings and state.
//
//   for (int i = 0; i < n; ++i) {                              // gradients of several micro-batches, reduced once
//     fsdp(model).set_requires_gradient_sync(i == n - 1);
//     loss(model(batch[i])).backward();
//   }
//   optimizer.step();
//
// Settings must be equal on all ranks. They take effect at the unit's next forward or backward.
//
// Thread safety: use from the thread that runs the rank's forward and backward.
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

/// An unshard in flight. Copies refer to the same one.
class UnshardHandle {
 public:
  UnshardHandle() = default;
  explicit UnshardHandle(std::weak_ptr<FSDPState> state) : state_(std::move(state)) {}
  /// Waits until the parameters are unsharded. The unit's next forward waits automatically.
  void wait();

 private:
  std::weak_ptr<FSDPState> state_;
};

/// A handle to a unit. Cheap to copy; the module must outlive it.
class FSDPModule {
 public:
  FSDPModule(torch::nn::Module& module, std::shared_ptr<FSDPState> state)
      : module_(&module), state_(std::move(state)) {}

  /// Gathers the unit's own parameters, read-only. They are freed by reshard() or the unit's next forward or backward.
  /// Collective. With async_op, only issues the all-gather.
  UnshardHandle unshard(bool async_op = false);
  /// Frees the unsharded parameters, if any. Throws StateError on a rank that changed one of them in place.
  void reshard();

  /// Sets FullyShardOptions::reshard_after_forward of this unit and, with `recurse`, of all units below it. With false,
  /// parameters stay unsharded even after a forward without grad mode; before writing them, set true and call
  /// reshard_all().
  void set_reshard_after_forward(bool value, bool recurse = true);
  /// With false, keeps parameters unsharded after backward, which saves an all-gather per accumulated micro-batch. Call
  /// reshard() on each unit before the optimizer steps.
  void set_reshard_after_backward(bool value, bool recurse = true);
  /// With false, skips the gather in backward, for a unit whose backward does not read its parameters (an embedding).
  void set_unshard_in_backward(bool value);

  /// With false, gradients accumulate unsharded, without communication. A later backward with true reduces their sum;
  /// until then grad() does not show them and zero_grad() does not clear them. Also sets set_requires_all_reduce().
  void set_requires_gradient_sync(bool value, bool recurse = true);
  /// With false, defers the all-reduce over replicas (HSDP, replicate) to a backward with true. Reduce-scatters still
  /// run.
  void set_requires_all_reduce(bool value, bool recurse = true);
  /// With false on the outermost unit, backward may return before its reductions finish. The last backward needs true.
  void set_is_last_backward(bool value);
  /// Divides this unit's summed gradients by `factor` instead of the number of ranks. Throws ValueError unless
  /// positive.
  void set_gradient_divide_factor(double factor);
  /// Restricts this unit's collectives to sums; the division becomes a separate step.
  void set_force_sum_reduction_for_comms(bool value);

  /// Calls `hook` after the unit's own collectives, for example to reduce over an axis outside the mesh. An empty
  /// function removes it. The hook changes the flat gradient in place, once per backward or bucket; on a GPU it runs on
  /// the engine's stream.
  void set_all_reduce_hook(std::function<void(const at::Tensor& flat_gradient)> hook);

  /// Replaces this unit's collectives; an empty function restores the default. See fully_shard/events/comm_overrides.h.
  void set_custom_all_gather(AllGatherFn all_gather);
  void set_custom_reduce_scatter(ReduceScatterFn reduce_scatter);
  void set_custom_all_reduce(AllReduceFn all_reduce);

  /// Sets the units to gather before this one computes. The list must be equal on all ranks; an empty list disables
  /// prefetching. nullopt (the default) follows the last iteration in forward, and reverses the forward order in
  /// backward. Throws ValueError if the list contains this unit.
  void set_modules_to_forward_prefetch(std::optional<std::vector<FSDPModule>> modules);
  void set_modules_to_backward_prefetch(std::optional<std::vector<FSDPModule>> modules);

  /// Discards an iteration that threw; the next forward does this automatically. Throws StateError unless this is the
  /// outermost unit.
  void reset_iter_state();

  /// Calls `observer` with every event of this unit and all units below it, in order. It must not call the model.
  void set_event_observer(const UnitObserver& observer);
  ShardedState unit_state() const;

  /// Returns the bytes of unsharded parameters that this unit holds now: 0 while sharded.
  size_t unsharded_bytes() const;
  /// Returns the number of this unit's own parameters.
  size_t num_parameters() const;

  /// Bytes of the memory pool that all units of a tree share for unsharded parameters and collectives.
  struct MemoryStats {
    size_t held = 0;           // allocated from the system
    size_t acquired = 0;       // in use now
    size_t peak_acquired = 0;  // since reset_peak_memory()
  };
  MemoryStats memory_stats() const;
  void reset_peak_memory();

  /// Throws StateError unless an optimizer may step: all units below are sharded and idle, and some gradient exists.
  void check_ready_for_step() const;

 private:
  std::optional<std::vector<std::weak_ptr<FSDPState>>> targets(const std::optional<std::vector<FSDPModule>>& modules,
                                                               const char* caller) const;

  torch::nn::Module* module_;
  std::shared_ptr<FSDPState> state_;
};

/// Reshards every unit that owns a parameter of `module`, whether the unit is at, below or above it. Call it before
/// saving or loading. Throws StateError like reshard(), and inside the forward or backward of one of these units.
void reshard_all(ModuleRef module);

/// Returns whether a parameter of `module` is a DTensor now, or will be after reshard_all(). Equal on all ranks.
bool has_sharded_params(ModuleRef module);

/// Calls reshard_all(). If it throws StateError on one rank, all ranks that share these units' parameters throw
/// StateError; `where` prefixes the message on the other ranks. Collective over those ranks.
void reshard_on_all_ranks(ModuleRef module, const std::string& where);

/// Returns the handle of `module`. Throws StateError if neither fully_shard nor replicate was called on it.
FSDPModule fsdp(ModuleRef module);
/// Returns the handle of `module`, or nullopt if neither was called on it.
std::optional<FSDPModule> find_fsdp(ModuleRef module);

}  // namespace tessera
