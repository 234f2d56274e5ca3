#include "testing/fsdp_models/patches.h"

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

namespace tessera {

namespace {

/// Returns the replacement of a transition, wrapped around the previous one if there is any.
UnitSlot nested(const UnitSlot& former, UnitSlot replacement) {
  if (!former) {
    return replacement;
  }
  return [former, replacement = std::move(replacement)](const UnitCall& call) {
    const std::function<void()> run = [&] { former(call); };
    replacement({.unit = call.unit, .state = call.state, .run = run});
  };
}

}  // namespace

Patch::Patch(const Install& install)
    : slots_(comm_overrides()), former_(*slots_), exceptions_(std::uncaught_exceptions()) {
  barrier(default_group());
  install(*slots_);
}

Patch::~Patch() {
  if (std::uncaught_exceptions() == exceptions_) {
    try {
      barrier(default_group());
    } catch (const std::exception& error) {
      TORCH_WARN("a patch ends without its peers: ", error.what());
    }
  }
  *slots_ = std::move(former_);
}

Patch patch_all_gather(
    std::function<Pending(const AllGatherFn&, const at::Tensor&, const at::Tensor&, const ProcessGroupPtr&)>
        replacement) {
  return Patch(
      [&](CommOverrides& slots) { slots.all_gather = std::bind_front(std::move(replacement), slots.all_gather); });
}

Patch patch_reduce_scatter(std::function<Pending(const ReduceScatterFn&, const at::Tensor&, const at::Tensor&, ReduceOp,
                                                 const ProcessGroupPtr&)>
                               replacement) {
  return Patch([&](CommOverrides& slots) {
    slots.reduce_scatter = std::bind_front(std::move(replacement), slots.reduce_scatter);
  });
}

Patch patch_all_reduce(
    std::function<Pending(const AllReduceFn&, const at::Tensor&, ReduceOp, const ProcessGroupPtr&)> replacement) {
  return Patch(
      [&](CommOverrides& slots) { slots.all_reduce = std::bind_front(std::move(replacement), slots.all_reduce); });
}

Patch patch_unshard(UnitSlot replacement) {
  return Patch([&](CommOverrides& slots) { slots.unshard = nested(slots.unshard, std::move(replacement)); });
}

Patch patch_reshard(UnitSlot replacement) {
  return Patch([&](CommOverrides& slots) { slots.reshard = nested(slots.reshard, std::move(replacement)); });
}

Patch patch_post_backward(UnitSlot replacement) {
  return Patch(
      [&](CommOverrides& slots) { slots.post_backward = nested(slots.post_backward, std::move(replacement)); });
}

Pending reduce_scatter_with_assert(const std::function<void(const at::Tensor& output)>& check,
                                   const ReduceScatterFn& original, const at::Tensor& output, const at::Tensor& input,
                                   ReduceOp op, const ProcessGroupPtr& group) {
  check(output);
  return original(output, input, op, group);
}

}  // namespace tessera
