#pragma once
// FSDPModule: what can be asked of, and set on, a module after fully_shard. Names and meaning follow FSDPModule in
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
// All settings are the same on all ranks: they decide which collectives run. They hold from the unit's next forward or
// backward on, until they are set again.
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

  /// Gathers this unit's own parameters (not those of units below it). They stay until reshard() or the unit's next
  /// forward or backward frees them. They are to be read: one that was changed in place meanwhile is a StateError of
  /// reshard(), or of that forward or backward (summon_full_params keeps changes), and where their data were replaced
  /// (module.to(), set_data) the next gather throws it. With async_op it only issues the all-gather. Collective.
  UnshardHandle unshard(bool async_op = false);
  /// Back to shards; does nothing if they are sharded. Waits for the ranks that still gather from this one's shard.
  /// Throws StateError, of sharded parameters, if a full one was changed in place since unshard() or forward gathered
  /// it, other than through data(), which cannot be seen: the change is lost. (Not where there is one shard, which the
  /// full parameter is.) Only ranks that changed one throw.
  void reshard();

  /// See FullyShardOptions; for this unit, and with `recurse` for all units below it. true frees all of the parameters,
  /// also of a unit that was made to keep a share among some ranks. false keeps them also after a forward without grad
  /// mode, which else frees them: so an evaluation of many batches gathers once, and ranks need not have equally many.
  /// Then true, and reshard_all(module) before parameters are written; the end of a backward shards all units.
  void set_reshard_after_forward(bool value, bool recurse = true);
  /// false: the parameters stay unsharded after backward, which saves the next forward's all-gather while gradients
  /// accumulate. reshard() each unit before the optimizer steps; a step on unsharded parameters is an error.
  void set_reshard_after_backward(bool value, bool recurse = true);
  /// false: backward does not gather this unit's parameters, because it does not need them (an embedding).
  void set_unshard_in_backward(bool value);

  /// false: backward reduces no gradients, and no rank communicates for them. They add up unsharded, in the reduce
  /// dtype, until a backward with true reduces their sum. Until then `grad` does not show them and zero_grad() does
  /// not clear them. Sets set_requires_all_reduce() to the same value: where both differ, that is called after.
  void set_requires_gradient_sync(bool value, bool recurse = true);
  /// false: where there are replicas (HSDP on a 2-D mesh, replicate), gradients are reduce-scattered, if there are
  /// shards, but not yet all-reduced; the sums wait for a backward with true. Otherwise it changes nothing.
  void set_requires_all_reduce(bool value, bool recurse = true);
  /// false on the outermost unit: the next backwards do not wait for their reductions; the last one, with true, does.
  /// Sharded gradients are complete only then.
  void set_is_last_backward(bool value);
  /// Gradients of this unit's parameters, not of those of units below it, are sums over the ranks divided by `factor`
  /// in place of their number: a model's are all scaled alike only if each of its units gets the same. Throws
  /// ValueError unless it is positive and finite.
  void set_gradient_divide_factor(double factor);
  /// Collectives of this unit only add; the division becomes a step of its own.
  void set_force_sum_reduction_for_comms(bool value);

  /// `hook` is called once a backward with this rank's reduced gradients of the unit, flat and in the reduce dtype,
  /// after the unit's own collectives: for a reduction of one's own, over an axis that the mesh does not have. For a
  /// unit of replicate that is alone in its tree, whose gradients go in parts (bucket_cap_mb), it is called once a
  /// part. It changes the tensor in place; every rank calls it in the same order. A parameter that no rank of the
  /// unit's mesh used has zeros in it, and gets the gradient that is there after: ranks beyond the mesh may have used
  /// it. Empty: none. Gradients without sync do not pass it. On a GPU the current stream is then one of the engine's
  /// (fully_shard/memory/stream_lane.h).
  void set_all_reduce_hook(std::function<void(const at::Tensor& flat_gradient)> hook);

  /// Functions of one's own in place of the collectives of this unit: for another transport, say. They keep what
  /// fully_shard/events/comm_overrides.h promises; a reduction uses the op that it is given. Empty: the usual ones.
  /// What is sent has a few elements of the engine's own in it, so it must arrive as it is: for another encoding there
  /// is fully_shard/layout/all_gather_extension.h.
  void set_custom_all_gather(AllGatherFn all_gather);
  void set_custom_reduce_scatter(ReduceScatterFn reduce_scatter);
  /// Of the replicas (HSDP, replicate).
  void set_custom_all_reduce(AllReduceFn all_reduce);

  /// The units to gather ahead when this one's forward begins: their all-gathers are issued before it computes. Two or
  /// more overlap further and hold more memory. None given: the unit that came next in the last forward, which is the
  /// default. An empty list: nothing. All ranks give the same list. A unit of another model is gathered again if its
  /// parameters have changed before it runs. Throws ValueError if this unit is in it.
  void set_modules_to_forward_prefetch(std::optional<std::vector<FSDPModule>> modules);
  /// The same for backward. The default is the unit that came next in the last backward, or in the first backward the
  /// reverse of forward.
  void set_modules_to_backward_prefetch(std::optional<std::vector<FSDPModule>> modules);

  /// After an exception in forward or backward that is to be forgotten: waits for collectives in flight, reshards all
  /// units, drops unsharded gradients of this iteration and unreduced ones of earlier micro-batches. Only on the
  /// outermost unit; throws StateError on another. The next forward does it by itself after a backward that threw.
  void reset_iter_state();

  /// `observer` is called with every step of this unit and all below it, in order; empty: none. For tests and
  /// debugging. It must not call into the model.
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

  /// Throws StateError unless every unit from here down is between iterations with gradients to step on: no
  /// forward that awaits its backward (on this rank: one whose loss is kept does), no gradient that awaits its
  /// reduction, all parameters sharded, and a gradient on at least one. A stock optimizer passes over undefined
  /// gradients without a word, so call it where step() might come before backward().
  void check_ready_for_step() const;

 private:
  std::vector<std::weak_ptr<FSDPState>> targets(const std::vector<FSDPModule>& modules, const char* caller) const;

  torch::nn::Module* module_;
  std::shared_ptr<FSDPState> state_;
};

/// Reshards every unit that owns a parameter of `module`, at, below or above it. An unsharded parameter is a copy in
/// the compute dtype that the next reshard discards, so call this before parameters are saved or loaded. Waits as
/// reshard() does. Throws StateError inside of the forward or backward of one of these units, and as reshard() does.
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
