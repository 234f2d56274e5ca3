// What a unit does in backward; forward is in fsdp_state.cpp.

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "fully_shard/autograd/backward_hooks.h"
#include "fully_shard/engine/fsdp_root.h"
#include "fully_shard/engine/fsdp_state.h"

namespace tessera {

namespace {

/// Not so a backward that hands gradients of parameters to its caller.
void check_accumulates(const ParamGroup& group, const std::string& api) {
  for (const auto& param : group.params()) {
    TESSERA_CHECK(NotImplementedError, !param.requires_grad() || !is_captured(param.param()),
                  "{}: torch::autograd::grad() with respect to parameter '{}' of {}: what it returns would be "
                  "this rank's part alone, since gradients are reduced as backward() accumulates them. Call backward() "
                  "and read the parameters' grad()",
                  api, param.origin().name, param.origin().module);
  }
}

}  // namespace

void FSDPState::pre_backward(ForwardCall& forward_call, bool has_gradient) {
  const bool is_first = forward_call.backward != current_backward();  // not at another output before
  // The gather below tells all ranks what changed. Without it, or behind that of a recomputation, this one alone sees
  // it.
  const bool gathers = is_first && !forward_call.recomputation && settings_.unshard_in_backward;
  if (group_ && has_gradient && !gathers) {
    group_->unit_params().check_unchanged_since(forward_call.versions);
  }
  if (!is_first) {
    return;
  }
  if (forward_call.recomputation) {
    forward_call.recomputation->unpack();  // here, whichever outputs of the region this rank's loss uses
  }
  forward_call.backward = current_backward();
  forward_call.expected_in = -1;
  if (!group_) {
    return;  // its border is there for the units inside, which ranks reach by different outputs
  }
  root_->enter_backward(*this);
  check_accumulates(*group_, options_.api);
  group_->check_kept();
  phase_ = is_early() ? BackwardPhase::RunningEarly : BackwardPhase::Running;
  ++active_calls_;
  if (settings_.unshard_in_backward) {
    is_prefetched_ = false;
    group_->unshard_for_backward(forward_call.versions, has_gradient);
  }
  if (!settings_.prefetch_after_backward) {
    root_->prefetch_in_backward(*this);
  }
  if (!is_early()) {
    group_->gradients().begin();
  }
  report(FSDPEventKind::Backward);
}

void FSDPState::post_backward(const ForwardCall& forward_call) {
  if (!group_ || forward_call.backward != current_backward()) {
    return;  // the inputs' gradients do not come through this call's outputs
  }
  if (--active_calls_ > 0) {
    return;
  }
  if (settings_.prefetch_after_backward) {
    root_->prefetch_in_backward(*this);
  }
  const bool is_last = !is_due();
  // Autograd completes a parameter's gradient once, after the last call that used it.
  const bool reshards = settings_.reshard_after_backward && (is_last || ran_.size() == 1);
  // A forward may take a gradient through its own unit.
  reshard_and_reduce(reshards && running_forwards_.empty(), is_last);
}

void FSDPState::reshard_and_reduce(bool reshards, bool reduces) {
  run_step(slots_->post_backward, name_, group_->state(), [&] {
    if (reshards) {
      group_->reshard();
    }
    if (reduces) {
      reduce();
    }
  });
}

void FSDPState::reduce() {
  phase_ = BackwardPhase::Idle;
  const auto& gradients = settings_.gradients;
  if (gradients.requires_gradient_sync) {
    group_->gradients().check_none_frozen_since();
  }
  if (!group_->gradients().has_trainable()) {
    group_->gradients().restore();
    return;
  }
  if (!gradients.requires_gradient_sync) {
    group_->gradients().keep();
    has_unreduced_ = true;
    return;
  }
  has_unreduced_ = !gradients.requires_all_reduce && group_->has_replicas();
  root_->reductions().push(group_, gradients);
}

/// A gradient may come before backward does to the outermost unit: that of a parameter which only the loss uses (the
/// log_std of a policy), and which was whole then, as it is after the unit's forward. It is reduced with the others,
/// and may not be added to a sharded one that an earlier backward left.
void FSDPState::before_accumulation(size_t param, bool of_dtensor) {
  const bool may_be_of_shards = of_dtensor && !group_->is_unsharded();
  if (phase_ != BackwardPhase::Idle || may_be_of_shards || is_captured(group_->params()[param].param()) || !is_due()) {
    return;
  }
  root_->enter_backward(*this);
  group_->gradients().begin();
  phase_ = BackwardPhase::Early;
}

/// Of a parameter whose gradient arrived. Nobody would reduce a plain one that is refused, nor drop it later.
void FSDPState::check_arrival(size_t param) {
  const bool is_sharded = !group_->is_unsharded() && settings_.unshard_in_backward;
  if (is_early() || (!is_sharded && has_entered_backward())) {
    return;
  }
  group_->gradients().drop_arrived(param);
  constexpr auto kKept = "a tensor that forward kept as a member or wrote to an argument";
  const auto where =
      fmt::format("{}: a gradient of parameter '{}' arrived", options_.api, group_->params()[param].origin().name);
  throw StateError(
      is_sharded
          ? fmt::format(
                "{} while it is sharded: it was used outside the forward of {}, or the loss is made of {}. Call "
                "that module, not its parts, return the tensor from forward, and zero_grad() before the next "
                "backward",
                where, options_.label, kKept)
          : fmt::format("{} from a backward that came through no output of {}. The loss is made of the parameter "
                        "itself, or of {}. Return it from forward",
                        where, options_.label, kKept));
}

/// Of a term of the loss that was computed with the sharded parameter: it is that of the whole term already, which the
/// reduction adds the average to, as to what an earlier backward left. Not where it is on its way, or comes in between.
void FSDPState::take_sharded_gradient(size_t param) {
  const auto& own = group_->params()[param];
  if (own.has_foreign_grad()) {
    const auto mesh = fmt::format("{}", device_mesh(own.param().grad()));
    own.param().mutable_grad() = at::Tensor();
    throw StateError(fmt::format(
        "{0}: the gradient of parameter '{1}' of {2} is a DTensor on {3}: the parameter is a plain one, and forward "
        "computed with DTensors beside it. Let it be one of theirs: name its module in the tensor-parallel plan "
        "(SequenceParallel, say), or distribute_tensor() it as Replicate() on that mesh before {0}",
        options_.api, own.origin().name, options_.label, mesh));
  }
  const bool comes_first = !has_entered_backward() && !group_->is_unsharded() && !group_->gradients().is_reducing();
  TESSERA_CHECK(
      StateError, comes_first && (!root_ || root_->reductions().is_drained()),
      "{}: a gradient of parameter '{}' of {}, of a term of the loss that was computed with the sharded "
      "parameter, arrived when gradients were being reduced. Compute such a term after the model's forward, so that "
      "its gradient comes first, or call backward() on it by itself; and zero_grad() before the next backward",
      options_.api, own.origin().name, options_.label);
  group_->gradients().place_sharded(param);
}

void FSDPState::on_accumulated(size_t param) {
  if (group_->params()[param].has_sharded_grad()) {
    take_sharded_gradient(param);
    return;
  }
  check_arrival(param);
  auto& own = group_->gradients();
  if (!own.has_buckets()) {
    return;
  }
  own.check_not_taken(param);
  const auto& gradients = settings_.gradients;
  if (!has_entered_backward()) {
    own.arrived(param);  // early
    return;
  }
  if (gradients.requires_gradient_sync && gradients.requires_all_reduce && root_->is_in_outer_backward() && !is_due()) {
    own.arrived(param);
    root_->reductions().push_complete(group_, gradients);
  }
}

bool FSDPState::awaits_backward() const {
  return std::any_of(forward_calls_.begin(), forward_calls_.end(), [](const auto& weak) {
    const auto forward_call = weak.lock();
    return forward_call && forward_call->backward == -1;
  });
}

bool FSDPState::is_to_come(const ForwardCall& forward_call) {
  return forward_call.backward != current_backward() && forward_call.outputs.is_in_running_backward();
}

bool FSDPState::is_due(const ForwardCall& forward_call) {
  return forward_call.expected_in != -1 || is_to_come(forward_call);
}

// The graph of the backward that runs says it, of which all ranks have the same: a rank may keep others for long. It is
// noted when backward begins, for the backwards that are nested in it.
bool FSDPState::is_due() const {
  return std::any_of(forward_calls_.begin(), forward_calls_.end(), [](const auto& weak) {
    const auto forward_call = weak.lock();
    return forward_call && is_due(*forward_call);
  });
}

void FSDPState::prefetch_in_backward() {
  if (!group_ || !settings_.unshard_in_backward) {
    return;
  }
  bool has_call = false, has_changed = false;
  for (const auto& weak : forward_calls_) {
    if (const auto forward_call = weak.lock(); forward_call && is_due(*forward_call)) {
      has_call = true;
      has_changed = has_changed || group_->unit_params().has_changed_since(forward_call->versions);
    }
  }
  if (!has_call) {
    return;
  }
  forget_old_values();
  if (group_->start_for_backward(has_changed)) {
    is_prefetched_ = true;
  }
}

void FSDPState::begin_backward(int64_t id) {
  for (const auto& weak : forward_calls_) {
    const auto forward_call = weak.lock();
    if (forward_call && is_to_come(*forward_call)) {
      forward_call->expected_in = id;
    }
  }
}

void FSDPState::end_calls_of(int64_t id) {
  for (const auto& weak : forward_calls_) {
    const auto forward_call = weak.lock();
    if (forward_call && forward_call->expected_in == id) {
      forward_call->expected_in = -1;
    }
  }
  active_calls_ = 0;
}

void FSDPState::finish_backward(int64_t id) {
  end_calls_of(id);
  if (!group_) {
    return;
  }
  // Forward may take a gradient through a unit in it.
  const bool reshards = (settings_.reshard_after_backward || is_prefetched_) && running_forwards_.empty();
  is_prefetched_ = false;
  const bool reduces_rest = has_unreduced_ && settings_.gradients.requires_gradient_sync &&
                            (settings_.gradients.requires_all_reduce || !group_->has_replicas());
  if (phase_ != BackwardPhase::Idle) {
    reshard_and_reduce(reshards, /*reduces=*/true);
    return;
  }
  if (reshards) {
    group_->reshard();
  }
  if (reduces_rest) {
    reduce();
  }
}

void FSDPState::abort_backward(int64_t id) {
  end_calls_of(id);
  phase_ = BackwardPhase::Idle;
  has_unreduced_ = is_prefetched_ = false;
  if (group_) {
    group_->abort_backward(/*reshards=*/running_forwards_.empty());
  }
}

void FSDPState::abort_iteration() {
  running_forwards_.clear();
  forward_calls_.clear();
  ran_.assign(ran_.size(), false);
  is_differentiable_ = false;
  abort_backward(/*id=*/-1);  // no call is left that waits for one
}

}  // namespace tessera
