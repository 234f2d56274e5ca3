#pragma once
// CommOverrides: the functions through which a rank's units communicate and change state, which tests replace.
//
//   const auto slots = comm_overrides();                           // of the calling rank
//   slots->all_gather = [original = slots->all_gather](const auto& output, const auto& input, const auto& group) {
//     fmt::print("{} elements\n", output.numel());
//     return original(output, input, group);
//   };
//
// testing/fsdp_models/patches.h does it by guards. Programs use FSDPModule::set_custom_all_gather and its kin.
//
// Thread safety: for the thread that runs the rank's forward and backward; not while a collective is being issued.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string_view>

#include "comm/collectives.h"
#include "fully_shard/events/sharded_state.h"

namespace tessera {

/// Keep the contracts of comm/collectives.h: the same collectives on every rank, outputs written by wait().
using AllGatherFn =
    std::function<Pending(const at::Tensor& output, const at::Tensor& input, const ProcessGroupPtr& group)>;
using ReduceScatterFn = std::function<Pending(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                              const ProcessGroupPtr& group)>;
using AllReduceFn = std::function<Pending(const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group)>;

/// A step of a unit that is about to be taken.
struct UnitCall {
  std::string_view unit;  // its module's path below the outermost unit, "root" for that one
  ShardedState state;     // before it
  /// Takes the step.
  const std::function<void()>& run;
};
using UnitSlot = std::function<void(const UnitCall& call)>;

struct CommOverrides {
  AllGatherFn all_gather = all_gather_async;
  ReduceScatterFn reduce_scatter = reduce_scatter_async;
  AllReduceFn all_reduce = all_reduce_async;
  // Empty: the step is taken.
  UnitSlot unshard;        // issue a unit's all-gather; not called where it is gathered already
  UnitSlot reshard;        // free its full parameters, all or but for a share; not called where they are sharded
  UnitSlot post_backward;  // its backward is over: reshard and reduce its gradients
};

/// Returns whether it is the initial one: then the engine may use the form with segments, which sends the same.
bool is_default(const AllGatherFn& all_gather);
bool is_default(const ReduceScatterFn& reduce_scatter);

/// Returns those of the calling rank.
std::shared_ptr<CommOverrides> comm_overrides();

/// Takes the step, through `slot` if that is set.
template <class Step>
void run_step(const UnitSlot& slot, std::string_view unit, ShardedState state, Step&& step) {
  if (!slot) [[likely]] {
    step();
    return;
  }
  const auto held = slot;
  const std::function<void()> run = std::ref(step);
  held({.unit = unit, .state = state, .run = run});
}

}  // namespace tessera
