#include "fully_shard/engine/fsdp_state.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "activation_checkpoint/saved_tensor_hooks.h"
#include "base/error.h"
#include "base/report.h"
#include "dtensor/local/tensor_memory.h"
#include "fully_shard/autograd/backward_hooks.h"
#include "fully_shard/autograd/in_place_changes.h"
#include "fully_shard/engine/fsdp_root.h"
#include "nn/hooks/cast_floating.h"

namespace tessera {

namespace {

/// Counts the calls of all units, so that a call can detect other calls inside it.
thread_local int64_t differentiable_calls = 0;

}  // namespace

FSDPState::FSDPState(std::shared_ptr<ParamGroup> group, Options options)
    : group_(std::move(group)), options_(std::move(options)), name_(options_.label) {}

/// A failed backward may have left reductions that still write the gradients.
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

// The modules own their hooks, which own this state. Graphs and parameters may outlive it and hold weak references.
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
  if (group_) {
    group_->set_reporter([this](FSDPEventKind step) { report(step); });
    backward_.install();
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
  if (unit == 0) {
    backward_.expect_early_gradients();
  }
}

void FSDPState::replace_group(std::shared_ptr<ParamGroup> group) {
  group->set_custom_all_gather(group_->custom_all_gather());
  group_->set_reporter(nullptr);
  group_ = std::move(group);
  group_->set_reporter([this](FSDPEventKind step) { report(step); });
}

void FSDPState::report(FSDPEventKind step) const {
  if (settings_.observer) {
    settings_.observer({step, name_});
  }
}

bool FSDPState::is_running() const {
  return is_in_forward() || (backward_.is_entered() && current_backward() != -1);
}

/// Frees data that does not have the shards' values. A post-forward shard has the values that forward used, for its
/// backward. Full parameters may have been gathered before shards were written: by a prefetch of another tree, by the
/// user, or by a forward that kept them.
void FSDPState::drop_outdated() {
  if (current_backward() == -1 && group_->state() == ShardedState::ShardedPostForward) {
    group_->reshard();
  }
  if (!group_->is_outdated()) {
    return;
  }
  if (group_->is_prefetched() || !is_running()) {
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
  drop_outdated();
  group_->gather_stream()->wait_for_current();  // the caller may have written the parameters just now
  if (async_op) {
    group_->start();
  } else {
    group_->unshard();
  }
}

void FSDPState::prefetch(ShardFault fault) {
  if (group_) {
    drop_outdated();
    group_->prefetch(fault);
  }
}

void FSDPState::pre_forward(HookPoint& point, size_t module, TensorRefs inputs) {
  std::thread::id running;  // checked first: a forward in another thread may be writing all other state
  const auto own = std::this_thread::get_id();
  TESSERA_CHECK(StateError, thread_.compare_exchange_strong(running, own) || running == own,
                "{}: forward of {} was called while another thread runs it. Use one thread a rank", options_.api,
                options_.label);
  if (!root_) {
    FSDPRoot::make(point.module());
  }
  root_->enter_forward(*this, point.module());
  try {
    forget_autocasts();
    if (group_) {
      group_->check_kept();
      drop_outdated();
    }
  } catch (...) {
    root_->forward_failed();  // this call is not registered yet, so its own forward_failed() would not do this
    throw;
  }
  running_forwards_.emplace_back();
  ran_[module] = true;
  if (options_.mp_policy.cast_forward_inputs && options_.mp_policy.param_dtype) {
    cast_floating(inputs, *options_.mp_policy.param_dtype);
  }
  if (group_) {
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
  call.forward_call->expected_in = root_->awaited_backward();  // for a recomputed call, the backward that it is in
  call.number = ++differentiable_calls;
  call.first_node = at::sequence_number::peek();
  call.boundary = insert_input_nodes(
      inputs, call.number,
      [weak = weak_from_this(), weak_call = std::weak_ptr(call.forward_call)](bool) {
        const auto self = weak.lock();
        const auto forward_call = weak_call.lock();
        if (self && forward_call) {
          self->backward_.leave(*forward_call);
        }
      },
      root_->join_search(), call.inputs);
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
       .inputs = call.boundary,
       .first_node = call.first_node,
       .has_calls = call.number != differentiable_calls},
      [weak = weak_from_this(), forward_call, label = options_.label, api = options_.api](bool has_gradient) {
        const auto self = weak.lock();
        TESSERA_CHECK(
            StateError, self,
            "{}: backward through {}, which was destroyed: nobody gathers its parameters. Keep the module until its "
            "backward is over",
            api, label);
        self->backward_.enter(*forward_call, has_gradient);
      },
      root_->join_search());
  if (!forward_call->outputs) {
    return;
  }
  for (const auto* output : shared) {
    refuse_changes(*output, fmt::format("{}: an output of the unit {}", title.api, title.to_string()));
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
  if (!is_in_forward()) {
    thread_ = std::thread::id();
  }
}

/// Finishes a call after removing it from the open calls.
void FSDPState::end_call(RunningForward& call, TensorRefs outputs) {
  const auto& forward_call = call.forward_call;
  if (group_ && group_->is_unsharded() && current_backward() == -1) {
    group_->unit_params().check_not_written();
  }
  // Clones outputs that alias a parameter, such as a slice of a position table: its storage is freed at reshard.
  for (auto* output : outputs) {
    if (group_ && group_->unit_params().lends_memory_to(*output)) {
      *output = output->clone();
    }
  }
  if (forward_call) {
    insert_output_boundary(call, outputs);
  }
  const bool is_differentiable = forward_call && forward_call->outputs != nullptr;
  if (is_differentiable) {
    is_differentiable_ = is_differentiable_ || current_backward() == -1;
    backward_.add_call(forward_call);
  }
  const bool all_ran = std::ranges::find(ran_, false) == ran_.end();
  if (all_ran && !is_in_forward()) {
    if (group_ && !backward_.is_entered()) {
      reshard_after_forward(is_differentiable);
    }
    ran_.assign(ran_.size(), false);
  }
  if (options_.mp_policy.output_dtype) {
    cast_floating(outputs, *options_.mp_policy.output_dtype);
  }
}

/// Reshards if there will be no backward, since nothing else would free the parameters. Inside a backward, it comes
/// soon.
void FSDPState::reshard_after_forward(bool is_differentiable) {
  const auto& setting = settings_.reshard_after_forward;
  const bool reshards = setting ? *setting : options_.reshard_after_forward.value_or(!root_->is_outermost(*this));
  if (!is_differentiable && setting.value_or(true)) {
    group_->reshard();
  } else if (reshards && current_backward() == -1) {
    if (setting) {
      group_->reshard();
    } else {
      group_->reshard_after_forward();
    }
  }
}

/// Also runs for a call that failed before it was registered, or was rejected because another thread runs one.
void FSDPState::forward_failed() {
  if (thread_ != std::this_thread::get_id()) {
    return;
  }
  if (is_in_forward()) {
    running_forwards_.pop_back();
    if (!is_in_forward()) {
      ran_.assign(ran_.size(), false);
    }
    if (is_forward_stopped()) {
      root_->leave_forward(*this);  // a checkpointed region; the unit's backward will use the gathered parameters
    } else {
      root_->forward_failed();
      if (group_ && group_->is_unsharded() && !is_in_forward() && !backward_.is_entered()) {
        group_->reshard_unchecked();
      }
    }
  }
  if (!is_in_forward()) {
    thread_ = std::thread::id();
  }
}

void FSDPState::finish_forward() {
  if (!group_) {
    return;
  }
  const bool is_incomplete = std::ranges::find(ran_, true) != ran_.end();
  ran_.assign(ran_.size(), false);
  if (is_incomplete && group_->is_unsharded()) {
    reshard_after_forward(is_differentiable_);
  }
  is_differentiable_ = false;
  if (group_->is_prefetched()) {
    group_->drop_unshard();
  }
}

void FSDPState::abort_iteration() {
  running_forwards_.clear();
  ran_.assign(ran_.size(), false);
  is_differentiable_ = false;
  backward_.abort_all();
}

}  // namespace tessera
