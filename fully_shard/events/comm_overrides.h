#pragma once
// CommOverrides: a rank's hooks for communication and state transitions of units, which tests can replace.
//
//   const auto slots = comm_overrides();                           // for the calling rank
//   slots->all_gather = [original = slots->all_gather](const auto& output, const auto& input, const auto& group) {
//     fmt::print("{} elements\n", output.numel());
//     return original(output, input, group);
//   };
//
// testing/fsdp_models/patches.h has guards for this. Programs use FSDPModule::set_custom_all_gather and its siblings.
//
// Thread safety: for the thread that runs the rank's forward and backward; not while a collective is being issued.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string_view>

#include "comm/collectives.h"
#include "fully_shard/events/sharded_state.h"

namespace tessera {

/// Functions with the contracts of comm/collectives.h: equal collectives on every rank, output complete after wait().
using AllGatherFn =
    std::function<Pending(const at::Tensor& output, const at::Tensor& input, const ProcessGroupPtr& group)>;
using ReduceScatterFn = std::function<Pending(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                              const ProcessGroupPtr& group)>;
using AllReduceFn = std::function<Pending(const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group)>;

/// State transition of a unit, before it happens.
struct UnitCall {
  std::string_view unit;  // path of its module below the outermost unit, which is "root"
  ShardedState state;     // state before the transition
  /// Performs the transition.
  const std::function<void()>& run;
};
using UnitSlot = std::function<void(const UnitCall& call)>;

struct CommOverrides {
  AllGatherFn all_gather = all_gather_async;
  ReduceScatterFn reduce_scatter = reduce_scatter_async;
  AllReduceFn all_reduce = all_reduce_async;
  // If empty, the transition runs directly.
  UnitSlot unshard;        // issues a unit's all-gather; not called if already gathered
  UnitSlot reshard;        // frees full parameters (or all but a post-forward shard); not called if already sharded
  UnitSlot post_backward;  // ends the unit's backward: reshards and reduces gradients
};

/// Returns whether `all_gather` is the default. The engine may then use the equivalent segment form.
bool is_default(const AllGatherFn& all_gather);
bool is_default(const ReduceScatterFn& reduce_scatter);

/// Returns the overrides of the calling rank.
std::shared_ptr<CommOverrides> comm_overrides();

/// Runs a transition, through `slot` if it is set.
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
