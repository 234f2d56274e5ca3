#include "fully_shard/engine/fsdp_state.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include "activation_checkpoint/saved_tensor_hooks.h"
#include "base/error.h"
#include "base/report.h"
#include "dtensor/dtensor.h"
#include "fully_shard/autograd/backward_hooks.h"
#include "fully_shard/autograd/in_place_changes.h"
#include "fully_shard/engine/cast_floating.h"
#include "fully_shard/engine/fsdp_root.h"
#include "fully_shard/memory/autocast_cache.h"

namespace tessera {

namespace {

/// Of all units' forwards, so that a call knows whether there were others in it.
thread_local int64_t differentiable_calls = 0;

}  // namespace

FSDPState::FSDPState(std::shared_ptr<ParamGroup> group, Options options)
    : group_(std::move(group)), options_(std::move(options)), name_(options_.label) {}

/// A backward that failed may have left reductions that still write the gradients.
FSDPState::~FSDPState() {
  if (!group_) {
    return;
  }
  group_->set_reporter(nullptr);
  try {
    if (root_) {
      root_->reductions().await_streams();
    }
  } catch (const std::exception& failure) {
    report_failure("fully_shard: a unit ended while its gradients were reduced: {}", failure.what());
  }
}

// The modules own their hooks, and they own this state. Graphs and parameters may outlive it: they refer weakly.
void FSDPState::install(const std::vector<HookPoint*>& points) {
  const auto self = shared_from_this();
  ran_.assign(points.size(), false);
  for (size_t module = 0; module < points.size(); ++module) {
    auto& point = *points[module];
    modules_.push_back(point.module().weak_from_this());
    point.register_forward_pre_hook(
        [self, module](HookPoint& at, TensorRefs inputs) { self->pre_forward(at, module, inputs); },
        HookOrder::Prepend);
    point.register_forward_hook([self](HookPoint&, TensorRefs outputs) { self->post_forward(outputs); });
    point.register_exception_hook([self](HookPoint&) { self->forward_failed(); });
  }
  if (!group_) {
    return;
  }
  group_->set_reporter([this](FSDPEventKind step) { report(step); });
  for (size_t i = 0; i < group_->params().size(); ++i) {
    set_post_accumulate_grad_hook(group_->params()[i].param(), weak_from_this(),
                                  [i](FSDPState& state) { state.on_accumulated(i); });
  }
}

void FSDPState::join(std::shared_ptr<FSDPRoot> root, int64_t unit, UnitNames names, std::shared_ptr<BlockPool> pool) {
  root_ = std::move(root);
  unit_ = unit;
  name_ = names->at(static_cast<size_t>(unit));
  if (!group_) {
    return;
  }
  group_->set_place(unit, std::move(names), std::move(pool));
  if (unit == 0 && !std::exchange(expects_early_, true)) {
    for (size_t i = 0; i < group_->params().size(); ++i) {
      add_pre_accumulate_grad_hook(group_->params()[i].param(), weak_from_this(),
                                   [i](FSDPState& state, const at::TensorBase& grad) {
                                     state.before_accumulation(i, is_dtensor(at::Tensor(grad)));
                                   });
    }
  }
}

void FSDPState::report(FSDPEventKind step) const {
  if (settings_.observer) {
    settings_.observer({step, name_});
  }
}

bool FSDPState::reshards_after_forward() const {
  return options_.reshard_after_forward.value_or(!root_->is_outermost(*this));
}

void FSDPState::reshard_after_forward() {
  if (was_reshard_set_) {
    group_->reshard();
  } else {
    group_->reshard_after_forward();
  }
}

bool FSDPState::is_running() const {
  return is_in_forward() || (active_calls_ > 0 && current_backward() != -1);
}

/// A share has the values that forward computed with, for its backward. Others may have been gathered before shards
/// were written: ahead of time by a unit of another tree, by the user, or by a forward that left them.
void FSDPState::forget_old_values() {
  if (current_backward() == -1 && group_->state() == ShardedState::ShardedPostForward) {
    group_->reshard();
  }
  if (!group_->is_outdated()) {
    return;
  }
  if (is_prefetched_ || !is_running()) {
    group_->drop_unshard();
  }
  if (!is_running() && current_backward() == -1 && group_->is_unsharded()) {
    group_->reshard();
  }
}

void FSDPState::unshard(bool async_op) {
  if (!group_) {
    return;
  }
  forget_old_values();
  is_prefetched_ = false;
  group_->gather_stream()->wait_for_current();  // who calls it may have written the parameters just now
  if (async_op) {
    group_->start_if_sharded();
  } else {
    group_->unshard();
  }
}

void FSDPState::prefetch() {
  if (!group_) {
    return;
  }
  forget_old_values();
  if (group_->start_if_sharded()) {
    is_prefetched_ = true;
  }
}

/// Before anything is read that a forward in another thread may be writing.
void FSDPState::enter_thread() {
  const auto own = std::this_thread::get_id();
  std::thread::id running;
  TESSERA_CHECK(StateError, thread_.compare_exchange_strong(running, own) || running == own,
                "{}: forward of {} was called while another thread runs it. Use one thread a rank", options_.api,
                options_.label);
}

void FSDPState::leave_thread() {
  if (running_forwards_.empty()) {
    thread_ = std::thread::id();
  }
}

void FSDPState::pre_forward(HookPoint& point, size_t module, TensorRefs inputs) {
  enter_thread();
  if (!root_) {
    FSDPRoot::make(point.module());
  }
  root_->enter_forward(*this, point.module());
  try {
    forget_autocasts();
    if (group_) {
      group_->check_kept();
      forget_old_values();
    }
  } catch (...) {
    root_->forward_failed();  // no call is open yet, so that forward_failed() would not
    throw;
  }
  running_forwards_.emplace_back();
  ran_[module] = true;
  if (options_.mp_policy.cast_forward_inputs && options_.mp_policy.param_dtype) {
    cast_floating(inputs, *options_.mp_policy.param_dtype);
  }
  if (group_) {
    is_prefetched_ = false;
    group_->unshard();
    if (running_forwards_.size() == 1 && current_backward() == -1) {
      group_->unit_params().expect_no_writes();
    }
  }
  root_->prefetch_in_forward(*this);
  report(FSDPEventKind::Forward);
  if (at::GradMode::is_enabled()) {
    insert_input_boundary(running_forwards_.back(), inputs);
  }
}

void FSDPState::insert_input_boundary(RunningForward& call, TensorRefs inputs) {
  call.forward_call = std::make_shared<ForwardCall>();
  if (group_) {
    call.forward_call->versions = group_->unit_params().versions();
  }
  call.forward_call->expected_in = root_->awaited_backward();  // of one that is computed again, in whose backward it is
  call.number = ++differentiable_calls;
  call.first_node = at::sequence_number::peek();
  call.border = insert_input_nodes(
      inputs, call.number,
      [weak = weak_from_this(), weak_ticket = std::weak_ptr(call.forward_call)] {
        const auto self = weak.lock();
        const auto forward_call = weak_ticket.lock();
        if (self && forward_call) {
          self->post_backward(*forward_call);
        }
      },
      root_->hub_search(), call.inputs);
}

void FSDPState::insert_output_boundary(const RunningForward& call, TensorRefs outputs) {
  const auto& forward_call = call.forward_call;
  const UnitTitle title{.api = options_.api, .name = name_, .label = options_.label};
  check_inputs_unchanged(call.inputs, title);
  const auto shared = find_shared_outputs(outputs, call.inputs);
  if (SavedTensorHooksScope::is_open()) {
    forward_call->recomputation.emplace(at::empty({0}), /*is_output=*/false);
  }
  forward_call->outputs = insert_output_nodes(
      outputs, /*are_plain=*/shared.empty(),
      {.number = call.number,
       .inputs = call.border,
       .first_node = call.first_node,
       .has_calls = call.number != differentiable_calls},
      [weak = weak_from_this(), forward_call, label = options_.label, api = options_.api](bool has_gradient) {
        const auto self = weak.lock();
        TESSERA_CHECK(
            StateError, self,
            "{}: backward through {}, which was destroyed: nobody gathers its parameters. Keep the module until its "
            "backward is over",
            api, label);
        self->pre_backward(*forward_call, has_gradient);
      },
      root_->hub_search());
  if (!forward_call->outputs.exists()) {
    return;
  }
  for (const auto* output : shared) {
    refuse_changes(*output, fmt::format("{}: an output of the unit {}", title.api, title.to_string()));
  }
}

/// As positions may be, the first rows of a table: the copies stay when the parameters' memory goes, and who changes
/// one changes no parameter.
void FSDPState::copy_views_of_params(TensorRefs outputs) const {
  for (auto* output : outputs) {
    if (group_ && group_->unit_params().lends_memory_to(*output)) {
      *output = output->clone();
    }
  }
}

void FSDPState::post_forward(TensorRefs outputs) {
  auto call = std::move(running_forwards_.back());
  running_forwards_.pop_back();
  try {
    end_call(call, outputs);
  } catch (...) {
    running_forwards_.emplace_back();  // for forward_failed(), which comes next
    throw;
  }
  root_->leave_forward(*this);
  leave_thread();
}

/// What there is to do without the call, which is open no more.
void FSDPState::end_call(RunningForward& call, TensorRefs outputs) {
  const auto& forward_call = call.forward_call;
  if (group_ && group_->is_unsharded() && current_backward() == -1) {
    group_->unit_params().check_not_written();
  }
  copy_views_of_params(outputs);
  if (forward_call) {
    insert_output_boundary(call, outputs);
  }
  const bool differentiable = forward_call && forward_call->outputs.exists();
  if (differentiable) {
    is_differentiable_ = is_differentiable_ || current_backward() == -1;
    std::erase_if(forward_calls_, [](const auto& old) { return old.expired(); });
    forward_calls_.push_back(forward_call);
  }
  const bool all_ran = std::find(ran_.begin(), ran_.end(), false) == ran_.end();
  // Without a backward to come, nothing else would free the parameters; inside of one it comes at once.
  if (group_ && all_ran && running_forwards_.empty() && active_calls_ == 0) {
    if (!differentiable && !keeps_without_backward()) {
      group_->reshard();
    } else if (reshards_after_forward() && current_backward() == -1) {
      reshard_after_forward();
    }
  }
  if (all_ran && running_forwards_.empty()) {
    ran_.assign(ran_.size(), false);
  }
  if (options_.mp_policy.output_dtype) {
    cast_floating(outputs, *options_.mp_policy.output_dtype);
  }
}

/// Also of a call that did not get as far as to be open, or was refused beside one in another thread.
void FSDPState::forward_failed() {
  if (thread_ != std::this_thread::get_id()) {
    return;
  }
  if (!running_forwards_.empty()) {
    end_failed_call();
  }
  leave_thread();
}

void FSDPState::end_failed_call() {
  running_forwards_.pop_back();
  if (running_forwards_.empty()) {
    ran_.assign(ran_.size(), false);
  }
  if (is_forward_stopped()) {
    root_->leave_forward(*this);  // of a checkpointed region; the unit's backward is about to use what was gathered
    return;
  }
  root_->forward_failed();
  if (group_ && group_->is_unsharded() && running_forwards_.empty() && active_calls_ == 0) {
    group_->reshard_unchecked();
  }
}

void FSDPState::finish_forward() {
  if (!group_) {
    return;
  }
  const bool is_incomplete = std::find(ran_.begin(), ran_.end(), true) != ran_.end();
  ran_.assign(ran_.size(), false);
  if (is_incomplete && group_->is_unsharded()) {
    if (!is_differentiable_ && !keeps_without_backward()) {
      group_->reshard();
    } else if (reshards_after_forward()) {
      reshard_after_forward();
    }
  }
  is_differentiable_ = false;
  if (is_prefetched_) {
    group_->drop_unshard();
    is_prefetched_ = false;
  }
}

}  // namespace tessera
