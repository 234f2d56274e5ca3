// FSDP::register_comm_hook: a hook in the place of the engine's collectives for gradients. The engine sends flags
// beside the gradients (fully_shard/reduce/reduce_scatter_layout.h), which a hook does not see: they go by a small
// collective after it.

#include <algorithm>

#include "base/error.h"
#include "comm/collectives.h"
#include "fsdp1/fsdp.h"
#include "fsdp1/wrapper_state.h"
#include "fully_shard/engine/unit_tree.h"

namespace tessera {

namespace {

/// How many elements of a rank's part are gradients.
int64_t gradient_numel(const ParamGroup& group, int64_t part_numel) {
  return part_numel - gradient_flags_numel(static_cast<int64_t>(group.params().size()));
}

/// The group owns who calls it, so a pointer does.
ReduceScatterFn reduce_scatter_by(const CommHook& hook, const ParamGroup* group) {
  return [run = hook.run, group](const at::Tensor& output, const at::Tensor& input, ReduceOp,
                                 const ProcessGroupPtr& ranks) {
    const int64_t numel = output.numel(), gradients = gradient_numel(*group, numel), flags = numel - gradients;
    const auto parts = input.view({-1, numel});
    run(parts.narrow(1, 0, gradients).contiguous().view(-1), output.narrow(0, 0, gradients));
    reduce_scatter(output.narrow(0, gradients, flags), parts.narrow(1, gradients, flags).contiguous().view(-1),
                   ReduceOp::Sum, ranks);
    return Pending();
  };
}

AllReduceFn all_reduce_by(const CommHook& hook, const ParamGroup* group) {
  return [run = hook.run, group](const at::Tensor& tensor, ReduceOp, const ProcessGroupPtr& ranks) {
    const int64_t gradients = gradient_numel(*group, tensor.numel());
    run(tensor.narrow(0, 0, gradients), at::Tensor());
    all_reduce(tensor.narrow(0, gradients, tensor.numel() - gradients), ReduceOp::Sum, ranks);
    return Pending();
  };
}

}  // namespace

void FSDP::register_comm_hook(CommHook hook) const {
  TESSERA_CHECK(StateError, check_is_root(),
                "register_comm_hook: {} is a unit of a larger model; call it on the outermost one",
                unit_->state->label());
  unit_->assert_state("register_comm_hook", {TrainingState::IDLE});
  const auto units = fsdp_units(*module_);
  for (const auto& [path, module, unit] : units) {
    const auto name = path.empty() ? "the root" : fmt::format("'{}'", path);
    TESSERA_CHECK(NotImplementedError, !is_hybrid(unit->strategy),
                  "register_comm_hook: {} is {}, whose gradients go over two groups of ranks; a hook is for "
                  "FULL_SHARD, SHARD_GRAD_OP and NO_SHARD",
                  name, to_string(unit->strategy));
    TESSERA_CHECK(StateError, !unit->comm_hook, "register_comm_hook: {} has a hook already; register one, once", name);
  }
  for (const auto& [path, state] : fsdp_states(*module_)) {
    const auto is_own = [&own = state](const NamedUnit& named) { return named.unit->state == own; };
    TESSERA_CHECK(NotImplementedError, std::ranges::any_of(units, is_own),
                  "register_comm_hook: '{}' is a unit of fully_shard or replicate, whose gradients a hook would not "
                  "see; wrap it in FullyShardedDataParallel, or set collectives of your own on all units, "
                  "fsdp(module).set_custom_reduce_scatter() and set_custom_all_reduce()",
                  path);
  }
  TESSERA_CHECK(ValueError, hook.run != nullptr,
                "register_comm_hook: the hook's run is empty; give a function of (full_flat_grad, output)");
  for (const auto& [path, module, unit] : units) {
    unit->comm_hook = hook;
    const auto* group = unit->state->group().get();
    if (!group) {
      continue;
    }
    // Divided by 1 after a sum: not at all.
    auto& gradients = unit->state->settings().gradients;
    gradients.divide_factor = 1;
    gradients.reduce_scatter = reduce_scatter_by(hook, group);
    gradients.all_reduce = all_reduce_by(hook, group);
  }
}

bool FSDP::low_precision_hook_enabled() const {
  return unit_->comm_hook && unit_->comm_hook->is_low_precision;
}

}  // namespace tessera
