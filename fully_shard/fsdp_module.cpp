#include "fully_shard/fsdp_module.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "fully_shard/autograd/backward_hooks.h"
#include "fully_shard/engine/fsdp_root.h"
#include "fully_shard/engine/unit_tree.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

/// Calls `apply` with the settings of the unit of `module` and, if `recurse`, with those of all units below.
template <class Apply>
void for_settings(torch::nn::Module& module, FSDPState& own, bool recurse, Apply&& apply) {
  apply(own.settings());
  if (!recurse) {
    return;
  }
  for (const auto& [path, state] : fsdp_states_of_unit(module)) {
    if (state.get() != &own) {
      apply(state->settings());
    }
  }
}

/// Returns the units at and below `module`, and units above it that own its parameters.
std::vector<NamedState> units_of_params(torch::nn::Module& module) {
  auto units = fsdp_states(module);
  for (const auto& param : module.parameters()) {
    auto owner = find_owner(param);
    const auto is_owner = [&](const NamedState& unit) { return unit.state == owner; };
    if (owner && std::ranges::none_of(units, is_owner)) {
      const std::string name = owner->name();
      units.push_back({name, std::move(owner)});
    }
  }
  return units;
}

void check_not_running(const std::vector<NamedState>& units, const torch::nn::Module& module) {
  for (const auto& [path, state] : units) {
    TESSERA_CHECK(
        StateError, !state->is_running(),
        "parameters of {}, or their states, are to be saved or loaded while the unit '{}' computes with them; "
        "do it outside of forward and backward",
        module_type_name(module), path);
  }
}

}  // namespace

void reshard_all(ModuleRef module) {
  const auto states = units_of_params(*module);
  check_not_running(states, *module);
  if (const auto fault = reshard_each(states); !fault.empty()) {
    throw StateError(fault);
  }
}

bool has_sharded_params(ModuleRef module) {
  return std::ranges::any_of(module->parameters(), [](const at::Tensor& param) {
    if (is_dtensor(param)) {
      return true;
    }
    const auto owner = find_owner(param);
    return owner && owner->group() && owner->group()->is_unsharded();
  });
}

void reshard_on_all_ranks(ModuleRef module, const std::string& where) {
  if (!has_sharded_params(module)) {
    reshard_all(module);
    return;
  }
  std::string fault;
  try {
    reshard_all(module);
  } catch (const StateError& error) {
    fault = error.what();
  }
  throw_on_all_ranks(with_shards(units_of_params(*module)), where, fault);
}

FSDPModule fsdp(ModuleRef module) {
  auto found = find_fsdp(module);
  TESSERA_CHECK(StateError, found, "fsdp({}): neither fully_shard nor replicate was called on this module",
                module_type_name(*module));
  return *std::move(found);
}

std::optional<FSDPModule> find_fsdp(ModuleRef module) {
  auto state = find_fsdp_state(*module);
  return state ? std::optional(FSDPModule(*module, std::move(state))) : std::nullopt;
}

void UnshardHandle::wait() {
  const auto state = state_.lock();
  state_.reset();
  if (state && state->group() && state->group()->state() == ShardedState::Unsharding) {
    state->unshard(/*async_op=*/false);
  }
}

UnshardHandle FSDPModule::unshard(bool async_op) {
  state_->unshard(async_op);
  return async_op ? UnshardHandle(state_) : UnshardHandle();
}

void FSDPModule::reshard() {
  if (state_->group()) {
    state_->group()->reshard();
  }
}

void FSDPModule::set_reshard_after_forward(bool value, bool recurse) {
  for_settings(*module_, *state_, recurse, [&](auto& settings) { settings.reshard_after_forward = value; });
}

void FSDPModule::set_reshard_after_backward(bool value, bool recurse) {
  for_settings(*module_, *state_, recurse, [&](auto& settings) { settings.reshard_after_backward = value; });
}

void FSDPModule::set_unshard_in_backward(bool value) {
  state_->settings().unshard_in_backward = value;
}

void FSDPModule::set_requires_gradient_sync(bool value, bool recurse) {
  for_settings(*module_, *state_, recurse, [&](auto& settings) {
    settings.gradients.requires_gradient_sync = settings.gradients.requires_all_reduce = value;
  });
}

void FSDPModule::set_requires_all_reduce(bool value, bool recurse) {
  for_settings(*module_, *state_, recurse, [&](auto& settings) { settings.gradients.requires_all_reduce = value; });
}

void FSDPModule::set_is_last_backward(bool value) {
  state_->settings().is_last_backward = value;
}

void FSDPModule::set_gradient_divide_factor(double factor) {
  TESSERA_CHECK(ValueError, std::isfinite(factor) && factor > 0,
                "set_gradient_divide_factor: {}; a positive, finite number is needed", factor);
  state_->settings().gradients.divide_factor = factor;
}

void FSDPModule::set_force_sum_reduction_for_comms(bool value) {
  state_->settings().gradients.force_sum = value;
}

void FSDPModule::set_all_reduce_hook(std::function<void(const at::Tensor&)> hook) {
  state_->settings().gradients.all_reduce_hook = std::move(hook);
}

void FSDPModule::set_custom_all_gather(AllGatherFn all_gather) {
  if (state_->group()) {
    state_->group()->set_custom_all_gather(std::move(all_gather));
  }
}

void FSDPModule::set_custom_reduce_scatter(ReduceScatterFn reduce_scatter) {
  state_->settings().gradients.reduce_scatter = std::move(reduce_scatter);
}

void FSDPModule::set_custom_all_reduce(AllReduceFn all_reduce) {
  state_->settings().gradients.all_reduce = std::move(all_reduce);
}

std::optional<std::vector<std::weak_ptr<FSDPState>>> FSDPModule::targets(
    const std::optional<std::vector<FSDPModule>>& modules, const char* caller) const {
  if (!modules) {
    return std::nullopt;
  }
  std::vector<std::weak_ptr<FSDPState>> targets;
  for (const auto& module : *modules) {
    TESSERA_CHECK(ValueError, module.state_ != state_, "{}: {} is to prefetch itself", caller, state_->label());
    targets.push_back(module.state_);
  }
  return targets;
}

void FSDPModule::set_modules_to_forward_prefetch(std::optional<std::vector<FSDPModule>> modules) {
  state_->settings().forward_prefetch = targets(modules, "set_modules_to_forward_prefetch");
}

void FSDPModule::set_modules_to_backward_prefetch(std::optional<std::vector<FSDPModule>> modules) {
  state_->settings().backward_prefetch = targets(modules, "set_modules_to_backward_prefetch");
}

void FSDPModule::reset_iter_state() {
  const auto& root = state_->root();
  if (!root) {
    return;  // no forward has run yet
  }
  TESSERA_CHECK(StateError, root->is_outermost(*state_),
                "reset_iter_state: {} is the unit '{}' of a larger model; call it on the outermost module",
                state_->label(), state_->name());
  root->reset_iter_state();
}

void FSDPModule::set_event_observer(const UnitObserver& observer) {
  for_settings(*module_, *state_, /*recurse=*/true, [&](auto& settings) { settings.observer = observer; });
}

ShardedState FSDPModule::unit_state() const {
  return state_->group() ? state_->group()->state() : ShardedState::Sharded;
}

size_t FSDPModule::unsharded_bytes() const {
  return state_->group() ? state_->group()->unit_params().unsharded_bytes() : 0;
}

size_t FSDPModule::num_parameters() const {
  return state_->group() ? state_->group()->params().size() : 0;
}

FSDPModule::MemoryStats FSDPModule::memory_stats() const {
  if (!state_->group()) {
    return {};
  }
  const auto [held, acquired, peak] = state_->group()->pool()->stats();
  return {.held = held, .acquired = acquired, .peak_acquired = peak};
}

void FSDPModule::reset_peak_memory() {
  if (state_->group()) {
    state_->group()->pool()->reset_peak();
  }
}

void FSDPModule::check_ready_for_step() const {
  bool has_grad = false;
  for (const auto& [path, state] : fsdp_states(*module_)) {
    TESSERA_CHECK(StateError, !state->backward().is_awaited(),
                  "optimizer step: the forward of {} still awaits its backward; call loss.backward() before step()",
                  state->label());
    TESSERA_CHECK(StateError, !state->backward().has_unreduced(),
                  "optimizer step: gradients of {} await their reduction; the last backward before step() needs "
                  "set_requires_gradient_sync(true), set_requires_all_reduce(true) and set_is_last_backward(true)",
                  state->label());
    if (!state->group()) {
      continue;
    }
    TESSERA_CHECK(StateError, !state->group()->is_unsharded(),
                  "optimizer step: the parameters of {} are unsharded; call fsdp(module).reshard() before step()",
                  state->label());
    for (const auto& param : state->group()->params()) {
      has_grad = has_grad || param.param().grad().defined();
    }
  }
  TESSERA_CHECK(StateError, has_grad,
                "optimizer step: no parameter of {} has a gradient, so step() would do nothing; call loss.backward() "
                "before step()",
                state_->label());
}

}  // namespace tessera
