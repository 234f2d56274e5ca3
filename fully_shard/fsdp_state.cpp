#include "fully_shard/fsdp_state.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "base/error.h"
#include "fully_shard/backward_hooks.h"

namespace tessera {

namespace {

void cast_floating(TensorRefs tensors, std::optional<at::ScalarType> dtype) {
  if (!dtype) {
    return;
  }
  for (auto* tensor : tensors) {
    if (tensor->is_floating_point()) {
      *tensor = tensor->to(*dtype);
    }
  }
}

}  // namespace

FSDPState::FSDPState(std::unique_ptr<ParamGroup> group, Options options)
    : group_(std::move(group)), options_(std::move(options)) {}

// The module owns its hooks, and they own this state. Graphs and parameters may outlive it: they refer weakly.
void FSDPState::install(HookPoint& point) {
  const auto self = shared_from_this();
  point.register_forward_pre_hook([self](HookPoint& at, TensorRefs inputs) { self->pre_forward(at, inputs); },
                                  HookOrder::Prepend);
  point.register_forward_hook([self](HookPoint&, TensorRefs outputs) { self->post_forward(outputs); });
  point.register_exception_hook([self](HookPoint&) { self->forward_failed(); });
  if (!group_) {
    return;
  }
  for (size_t i = 0; i < group_->params().size(); ++i) {
    set_post_accumulate_grad_hook(group_->params()[i].param(), [weak = weak_from_this(), i] {
      if (const auto state = weak.lock()) {
        state->on_accumulated(i);
      }
    });
  }
}

bool FSDPState::reshards_after_forward() const {
  return options_.reshard_after_forward.value_or(!root_->is_outermost(*this));
}

void FSDPState::pre_forward(HookPoint& point, TensorRefs inputs) {
  if (!root_) {
    const auto states = fsdp_states(point.module());
    root_ = std::make_shared<FSDPRoot>(std::vector<std::weak_ptr<FSDPState>>(states.begin(), states.end()));
    for (const auto& state : states) {
      state->set_root(root_);
    }
  }
  root_->recover();
  open_calls_.push_back(nullptr);
  if (options_.mp_policy.cast_forward_inputs) {
    cast_floating(inputs, options_.mp_policy.param_dtype);
  }
  if (!group_) {
    return;
  }
  group_->unshard();
  if (at::GradMode::is_enabled()) {
    auto ticket = std::make_shared<Ticket>();
    ticket->versions = group_->versions();
    ticket->has_input_node = insert_backward_node(inputs, [weak = weak_from_this(), ticket] {
      if (const auto self = weak.lock()) {
        self->post_backward(*ticket);
      }
    });
    open_calls_.back() = std::move(ticket);
  }
}

void FSDPState::post_forward(TensorRefs outputs) {
  const auto ticket = std::move(open_calls_.back());
  open_calls_.pop_back();
  const bool differentiable = ticket && insert_backward_node(outputs, [weak = weak_from_this(), ticket] {
                                if (const auto self = weak.lock()) {
                                  self->pre_backward(*ticket);
                                }
                              });
  if (differentiable) {
    std::erase_if(tickets_, [](const auto& old) { return old.expired(); });
    tickets_.push_back(ticket);
  }
  // Without a backward to come, nothing else would free the parameters.
  if (group_ && open_calls_.empty() && active_calls_ == 0 && (reshards_after_forward() || !differentiable)) {
    group_->reshard();
  }
  cast_floating(outputs, options_.mp_policy.output_dtype);
}

void FSDPState::forward_failed() {
  if (!open_calls_.empty()) {
    open_calls_.pop_back();
  }
  if (group_ && open_calls_.empty() && active_calls_ == 0) {
    group_->reshard();
  }
}

void FSDPState::check_versions(const Ticket& ticket) const {
  const auto now = group_->versions();
  for (size_t i = 0; i < now.size(); ++i) {
    TESSERA_CHECK(StateError, now[i] == ticket.versions[i],
                  "fully_shard: parameter '{}' of {} was changed in place between forward and backward, so its "
                  "gradient would be that of other values. Run backward() before optimizer.step(), or forward again "
                  "after it",
                  group_->params()[i].origin().name, options_.label);
  }
}

void FSDPState::pre_backward(Ticket& ticket) {
  root_->backward_reached();
  check_versions(ticket);
  ticket.backward = current_backward();
  backward_started_ = true;
  ++active_calls_;
  group_->unshard();
  group_->begin_backward();
}

void FSDPState::post_backward(Ticket& ticket) {
  if (ticket.backward != current_backward()) {
    return;  // the inputs' gradients do not come through this call's outputs
  }
  if (--active_calls_ == 0) {
    group_->reshard();
    reduce_if_last();
  }
}

/// Autograd completes a parameter's gradient once, after the last call that used it.
void FSDPState::reduce_if_last() {
  if (!awaits_backward()) {
    group_->reduce_gradients();
    backward_started_ = false;
  }
}

void FSDPState::on_accumulated(size_t param) const {
  TESSERA_CHECK(StateError, group_->is_unsharded(),
                "fully_shard: a gradient of parameter '{}' arrived while it is sharded: it was used outside the "
                "forward of {}. Call that module, not its parts",
                group_->params()[param].origin().name, options_.label);
}

bool FSDPState::awaits_backward() const {
  return std::any_of(tickets_.begin(), tickets_.end(), [](const auto& weak) {
    const auto ticket = weak.lock();
    return ticket && ticket->backward == -1;
  });
}

void FSDPState::finish_backward() {
  active_calls_ = 0;
  if (!group_) {
    return;
  }
  group_->reshard();
  if (backward_started_) {
    group_->reduce_gradients();
    backward_started_ = false;
  }
}

void FSDPState::abort_backward() {
  active_calls_ = 0;
  backward_started_ = false;
  if (group_) {
    group_->abort_backward();
  }
}

bool FSDPRoot::is_outermost(const FSDPState& state) const {
  return states_.front().lock().get() == &state;
}

void FSDPRoot::backward_reached() {
  if (backward_ == current_backward()) {
    return;
  }
  backward_ = current_backward();
  at_end_of_backward([weak = weak_from_this()] {
    if (const auto self = weak.lock()) {
      self->finish_backward();
    }
  });
}

void FSDPRoot::finish_backward() {
  backward_ = -1;
  for (auto state = states_.rbegin(); state != states_.rend(); ++state) {
    if (const auto locked = state->lock()) {
      locked->finish_backward();
    }
  }
}

void FSDPRoot::recover() {
  if (backward_ == -1 || current_backward() != -1) {
    return;
  }
  backward_ = -1;
  for (const auto& state : states_) {
    if (const auto locked = state.lock()) {
      locked->abort_backward();
    }
  }
}

std::shared_ptr<FSDPState> find_fsdp_state(torch::nn::Module& module) {
  const auto* point = find_hook_point(module);
  return point ? point->find<FSDPState>() : nullptr;
}

std::vector<std::shared_ptr<FSDPState>> fsdp_states(torch::nn::Module& module) {
  std::vector<std::shared_ptr<FSDPState>> states;
  if (auto state = find_fsdp_state(module)) {
    states.push_back(std::move(state));
  }
  for (const auto& child : module.children()) {
    for (auto& state : fsdp_states(*child)) {
      if (std::find(states.begin(), states.end(), state) == states.end()) {
        states.push_back(std::move(state));
      }
    }
  }
  return states;
}

}  // namespace tessera
