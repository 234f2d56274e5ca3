#include "fully_shard/engine/unit_backward.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "fully_shard/autograd/backward_hooks.h"
#include "fully_shard/engine/fsdp_root.h"

namespace tessera {

namespace {

/// Throws for a backward that returns gradients of parameters to its caller.
void check_accumulates(const FSDPState& unit) {
  for (const auto& param : unit.group()->params()) {
    TESSERA_CHECK(NotImplementedError, !param.requires_grad() || !is_captured(param.param()),
                  "{}: torch::autograd::grad() with respect to parameter '{}' of {}: what it returns would be "
                  "this rank's part alone, since gradients are reduced as backward() accumulates them. Call backward() "
                  "and read the parameters' grad()",
                  unit.api(), param.origin().name, param.origin().module);
  }
}

/// Throws for a plain parameter's gradient from an op with DTensors, which is dropped.
void check_not_foreign(const ShardedParam& param, const FSDPState& unit) {
  const DeviceMesh mesh = device_mesh(param.param().grad());
  if (mesh == param.spec()->mesh()) {
    return;
  }
  param.param().mutable_grad() = at::Tensor();
  throw StateError(fmt::format(
      "{0}: the gradient of parameter '{1}' of {2} is a DTensor on {3}: the parameter is a plain one, and forward "
      "computed with DTensors beside it. Let it be one of theirs: name its module in the tensor-parallel plan "
      "(SequenceParallel, say), or distribute_tensor() it as Replicate() on that mesh before {0}",
      unit.api(), param.origin().name, unit.label(), mesh));
}

bool is_to_come(const ForwardCall& call) {
  return call.backward != current_backward() && is_in_running_backward(call.outputs);
}

/// Uses the graph of the running backward or, for one nested in it, the calls recorded when it began.
bool is_due_call(const ForwardCall& call) {
  return call.expected_in != -1 || is_to_come(call);
}

template <class Predicate>
bool any_live(const std::vector<std::weak_ptr<ForwardCall>>& calls, Predicate predicate) {
  return std::ranges::any_of(calls, [&](const auto& weak) {
    const auto call = weak.lock();
    return call && predicate(*call);
  });
}

}  // namespace

void UnitBackward::install() {
  const auto& params = unit_.group()->params();
  for (size_t i = 0; i < params.size(); ++i) {
    set_post_accumulate_grad_hook(params[i].param(), unit_.weak_from_this(),
                                  [i](FSDPState& unit) { unit.backward().on_accumulated(i); });
  }
}

void UnitBackward::expect_early_gradients() {
  if (std::exchange(expects_early_, true)) {
    return;
  }
  const auto& params = unit_.group()->params();
  for (size_t i = 0; i < params.size(); ++i) {
    add_pre_accumulate_grad_hook(params[i].param(), unit_.weak_from_this(),
                                 [i](FSDPState& unit, const at::TensorBase& grad) {
                                   unit.backward().before_accumulation(i, is_dtensor(at::Tensor(grad)));
                                 });
  }
}

void UnitBackward::add_call(const std::shared_ptr<ForwardCall>& call) {
  std::erase_if(calls_, [](const auto& old) { return old.expired(); });
  calls_.push_back(call);
}

bool UnitBackward::is_awaited() const {
  return any_live(calls_, [](const ForwardCall& call) { return call.backward == -1; });
}

bool UnitBackward::is_due() const {
  return any_live(calls_, is_due_call);
}

bool UnitBackward::has_unreduced() const {
  return has_unreduced_ || (unit_.group() && unit_.group()->gradients().is_reducing());
}

void UnitBackward::prefetch() {
  if (!unit_.group() || !unit_.settings().unshard_in_backward || !is_due()) {
    return;
  }
  const bool has_changed = any_live(calls_, [this](const ForwardCall& call) {
    return is_due_call(call) && unit_.group()->unit_params().has_changed_since(call.versions);
  });
  unit_.prefetch(has_changed ? ShardFault::MaybeChanged : ShardFault::None);
}

void UnitBackward::begin(int64_t id) {
  for (const auto& weak : calls_) {
    if (const auto call = weak.lock(); call && is_to_come(*call)) {
      call->expected_in = id;
    }
  }
}

void UnitBackward::enter(ForwardCall& call, bool has_gradient) {
  const auto& group = unit_.group();
  const auto& settings = unit_.settings();
  const bool is_first = call.backward != current_backward();  // not reached by another output before
  // The gather below tells all ranks about changes. Without it, or after that of a recomputation, only this rank
  // detects them.
  const bool gathers = is_first && !call.recomputation && settings.unshard_in_backward;
  if (group && has_gradient && !gathers) {
    group->unit_params().check_unchanged_since(call.versions);
  }
  if (!is_first) {
    return;
  }
  if (call.recomputation) {
    call.recomputation->unpack();  // now, whichever outputs of the region this rank's loss uses
  }
  call.backward = current_backward();
  call.expected_in = -1;
  if (!group) {
    return;  // this boundary serves the units inside, which ranks reach by different outputs
  }
  unit_.root()->enter_backward(unit_);
  check_accumulates(unit_);
  group->check_kept();
  phase_ = is_early() ? Phase::RunningEarly : Phase::Running;
  ++active_calls_;
  if (settings.unshard_in_backward) {
    group->unshard(has_gradient ? &call.versions : nullptr);
  }
  if (!settings.prefetch_after_backward) {
    unit_.root()->prefetch_in_backward(unit_);
  }
  if (!is_early()) {
    group->gradients().begin();
  }
  unit_.report(FSDPEventKind::Backward);
}

void UnitBackward::leave(const ForwardCall& call) {
  if (!unit_.group() || call.backward != current_backward()) {
    return;  // the inputs' gradients did not come through this call's outputs
  }
  if (--active_calls_ > 0) {
    return;
  }
  if (unit_.settings().prefetch_after_backward) {
    unit_.root()->prefetch_in_backward(unit_);
  }
  const bool is_last = !is_due();
  // Autograd completes a parameter's gradient once, after the last call that used it.
  const bool reshards = unit_.settings().reshard_after_backward && (is_last || unit_.modules().size() == 1);
  // A forward may take a gradient through its own unit.
  reshard_and_reduce(reshards && !unit_.is_in_forward(), is_last);
}

void UnitBackward::reshard_and_reduce(bool reshards, bool reduces) {
  run_step(slots_->post_backward, unit_.name(), unit_.group()->state(), [&] {
    if (reshards) {
      unit_.group()->reshard();
    }
    if (reduces) {
      reduce();
    }
  });
}

void UnitBackward::reduce() {
  phase_ = Phase::Idle;
  const auto& settings = unit_.settings().gradients;
  auto& gradients = unit_.group()->gradients();
  if (settings.requires_gradient_sync) {
    gradients.check_none_frozen_since();
  }
  if (!has_trainable(unit_.group()->params())) {
    gradients.restore();
    return;
  }
  if (!settings.requires_gradient_sync) {
    gradients.keep();
    has_unreduced_ = true;
    return;
  }
  has_unreduced_ = !settings.requires_all_reduce && unit_.group()->context().axes.replica_axis;
  unit_.root()->reductions().push(unit_.group(), settings);
}

/// Handles a gradient that arrives before backward reaches the outermost unit: that of a parameter that only the loss
/// uses (the log_std of a policy), and that was unsharded then, as it is after the unit's forward. It is reduced with
/// the others, and must not be added to a sharded one from an earlier backward.
void UnitBackward::before_accumulation(size_t param, bool of_dtensor) {
  const auto& group = unit_.group();
  const bool may_be_of_shards = of_dtensor && !group->is_unsharded();
  if (phase_ != Phase::Idle || may_be_of_shards || is_captured(group->params()[param].param()) || !is_due()) {
    return;
  }
  unit_.root()->enter_backward(unit_);
  group->gradients().begin();
  phase_ = Phase::Early;
}

/// Throws and drops a plain gradient that nothing would reduce.
void UnitBackward::check_arrival(size_t param) const {
  const auto& group = unit_.group();
  const bool is_sharded = !group->is_unsharded() && unit_.settings().unshard_in_backward;
  if (is_early() || (!is_sharded && phase_ == Phase::Running)) {
    return;
  }
  auto& own = group->unit_params().all()[param];
  own.take_accumulated();
  constexpr auto kKept = "a tensor that forward kept as a member or wrote to an argument";
  const auto& label = unit_.label();
  const auto where = fmt::format("{}: a gradient of parameter '{}' arrived", unit_.api(), own.origin().name);
  throw StateError(
      is_sharded
          ? fmt::format(
                "{} while it is sharded: it was used outside the forward of {}, or the loss is made of {}. Call "
                "that module, not its parts, return the tensor from forward, and zero_grad() before the next "
                "backward",
                where, label, kKept)
          : fmt::format("{} from a backward that came through no output of {}. The loss is made of the parameter "
                        "itself, or of {}. Return it from forward",
                        where, label, kKept));
}

/// Handles the gradient of a loss term computed with the sharded parameter, which is already that of the full term. The
/// reduction adds the average to it, as to the gradient of an earlier backward, unless it is in progress.
void UnitBackward::take_sharded_gradient(size_t param) const {
  const auto& group = unit_.group();
  auto& own = group->unit_params().all()[param];
  check_not_foreign(own, unit_);
  const bool comes_first = phase_ < Phase::Running && !group->is_unsharded() && !group->gradients().is_reducing();
  TESSERA_CHECK(
      StateError, comes_first && (!unit_.root() || unit_.root()->reductions().is_drained()),
      "{}: a gradient of parameter '{}' of {}, of a term of the loss that was computed with the sharded "
      "parameter, arrived when gradients were being reduced. Compute such a term after the model's forward, so that "
      "its gradient comes first, or call backward() on it by itself; and zero_grad() before the next backward",
      unit_.api(), own.origin().name, unit_.label());
  own.place_sharded_grad();
}

void UnitBackward::on_accumulated(size_t param) {
  const auto& group = unit_.group();
  if (group->params()[param].has_sharded_grad()) {
    take_sharded_gradient(param);
    return;
  }
  check_arrival(param);
  auto& gradients = group->gradients();
  if (!gradients.has_buckets()) {
    return;
  }
  gradients.check_not_taken(param);
  if (phase_ < Phase::Running) {
    gradients.arrived(param);  // early
    return;
  }
  const auto& settings = unit_.settings().gradients;
  if (settings.requires_gradient_sync && settings.requires_all_reduce && unit_.root()->is_in_outer_backward() &&
      !is_due()) {
    gradients.arrived(param);
    unit_.root()->reductions().push_complete(group, settings);
  }
}

void UnitBackward::end_calls(int64_t id) {
  for (const auto& weak : calls_) {
    if (const auto call = weak.lock(); call && call->expected_in == id) {
      call->expected_in = -1;
    }
  }
  active_calls_ = 0;
}

void UnitBackward::finish(int64_t id) {
  end_calls(id);
  const auto& group = unit_.group();
  if (!group) {
    return;
  }
  // Forward may take a gradient through a unit in it.
  const bool reshards = (unit_.settings().reshard_after_backward || group->is_prefetched()) && !unit_.is_in_forward();
  const auto& settings = unit_.settings().gradients;
  const bool reduces_rest = has_unreduced_ && settings.requires_gradient_sync &&
                            (settings.requires_all_reduce || !group->context().axes.replica_axis);
  if (phase_ != Phase::Idle) {
    reshard_and_reduce(reshards, /*reduces=*/true);
    return;
  }
  if (reshards) {
    group->reshard();
  }
  if (reduces_rest) {
    reduce();
  }
}

void UnitBackward::abort(int64_t id) {
  end_calls(id);
  phase_ = Phase::Idle;
  has_unreduced_ = false;
  if (unit_.group()) {
    unit_.group()->abort_backward(/*reshards=*/!unit_.is_in_forward());
  }
}

void UnitBackward::abort_all() {
  calls_.clear();
  abort(/*id=*/-1);  // no call still expects one
}

}  // namespace tessera
