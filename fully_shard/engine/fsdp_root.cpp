#include "fully_shard/engine/fsdp_root.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"
#include "comm/context/comm_observer.h"
#include "device_mesh/rank_agreement.h"
#include "fully_shard/autograd/backward_hooks.h"
#include "fully_shard/layout/gather_tag.h"

namespace tessera {

namespace {

/// Module of the outermost forward running in this thread; its type has a root.
thread_local torch::nn::Module* running_module = nullptr;

bool is_below(const torch::nn::Module& module, const torch::nn::Module& above) {
  const auto modules = above.modules(/*include_self=*/false);
  return std::any_of(modules.begin(), modules.end(), [&](const auto& below) { return below.get() == &module; });
}

/// Throws unless units that ran under another root are idle. Only one rank may know of a graph that expects a backward.
void check_taken_over(const std::vector<NamedState>& states) {
  if (std::ranges::none_of(states, [](const NamedState& unit) { return unit.state->root() != nullptr; })) {
    return;
  }
  std::string fault;
  for (const auto& [path, state] : states) {
    if (fault.empty() && !state->is_idle()) {
      fault = fmt::format(
          "{}: forward of {} takes over the unit '{}', which still awaits the backward, or the reduction, of "
          "a forward in which another module was the outermost one. Finish that iteration first, or drop its loss; "
          "if its backward threw, call reset_iter_state() on that module",
          states[0].state->api(), states[0].state->label(), path);
    }
  }
  throw_on_all_ranks(states, states[0].state->api(), fault);
}

/// Calls `visit` with each state that still exists.
template <class Visit>
void for_each_live(const std::vector<std::weak_ptr<FSDPState>>& units, Visit visit) {
  for (const auto& weak : units) {
    if (const auto unit = weak.lock()) {
      visit(*unit);
    }
  }
}

std::vector<std::shared_ptr<StreamLane>> gather_streams(const std::vector<NamedState>& states) {
  std::vector<std::shared_ptr<StreamLane>> streams;
  for (const auto& [path, state] : states) {
    if (state->group() && std::ranges::find(streams, state->group()->gather_stream()) == streams.end()) {
      streams.push_back(state->group()->gather_stream());
    }
  }
  return streams;
}

/// Returns the sizes of gradients that peers can read in place.
std::vector<size_t> gradient_bytes(const std::vector<NamedState>& states) {
  std::vector<size_t> bytes;
  for (const auto& [path, state] : states) {
    if (state->group()) {
      state->group()->gradients().add_exposed(bytes);
    }
  }
  return bytes;
}

/// Returns one line per frozen parameter on the mesh, at least one line.
std::vector<std::string> frozen_params_on(const DeviceMesh& mesh, const std::vector<NamedState>& units) {
  std::vector<std::string> lines;
  for (const auto& [path, state] : units) {
    if (!state->group()) {
      continue;
    }
    for (const auto& param : state->group()->params()) {
      if (!param.requires_grad() && param.spec()->mesh() == mesh) {
        lines.push_back(fmt::format("'{}' of unit '{}' frozen", param.origin().name, path));
      }
    }
  }
  if (lines.empty()) {
    lines.emplace_back("no frozen parameter");
  }
  return lines;
}

/// Ends unshards issued by the user. They carry the units' old numbers, and peers may be reading the shards.
void end_unshards(const std::vector<NamedState>& states) {
  for (const auto& [path, state] : states) {
    if (state->group() && state->group()->state() == ShardedState::Unsharding) {
      state->unshard(/*async_op=*/false);
    }
  }
}

}  // namespace

void FSDPRoot::make(torch::nn::Module& module) {
  const auto states = fsdp_states_of_unit(module);
  TESSERA_CHECK(StateError, !running_module || !is_below(module, *running_module),
                "{0}: {1} became a unit after the forward of the module around it, {2}, had run, which does not know "
                "it. Call {0} on all modules before the first forward",
                states.at(0).state->api(), states[0].state->label(),
                running_module ? module_type_name(*running_module) : "");
  check_unit_count(states.size(), states[0].state->api(), states[0].state->label());
  check_taken_over(states);
  auto names = std::make_shared<std::vector<std::string>>();
  std::vector<std::weak_ptr<FSDPState>> units;
  std::map<std::string, std::shared_ptr<BlockPool>> pools;  // one per device
  for (const auto& [path, state] : states) {
    names->push_back(path);
    units.push_back(state);
    if (const auto& group = state->group()) {
      pools.try_emplace(group->context().device.str(), group->pool());
    }
  }
  end_unshards(states);
  const std::shared_ptr<FSDPRoot> root(new FSDPRoot(std::move(units), gradient_bytes(states)));
  root->gather_streams_ = gather_streams(states);
  root->has_shards_ = std::ranges::any_of(states, [](const NamedState& unit) {
    return unit.state->group() && unit.state->group()->context().axes.num_shards() > 1;
  });
  // On the CPU each reduction compares them (reduce_scatter_layout.h), without another collective.
  root->agrees_on_frozen_ = std::ranges::all_of(states, [](const NamedState& unit) {
    return !unit.state->group() || unit.state->group()->context().device.is_cpu();
  });
  const auto has_params = [](const NamedState& unit) { return unit.state->group() != nullptr; };
  const bool is_alone = std::ranges::count_if(states, has_params) == 1;
  for (size_t i = 0; i < states.size(); ++i) {
    const auto& group = states[i].state->group();
    states[i].state->join(root, static_cast<int64_t>(i), names,
                          group ? pools.at(group->context().device.str()) : nullptr);
    if (group) {
      group->gradients().set_alone(is_alone);
    }
  }
}

// On a GPU, gradients of different parameters could otherwise be summed. This runs in forward if it communicates
// anyway; replicas may run forward on a single rank, so they check in backward.
void FSDPRoot::agree_on_frozen() {
  const UnobservedScope unobserved;
  std::vector<NamedState> units;
  for_each_live(states_, [&](FSDPState& unit) { units.push_back({unit.name(), unit.shared_from_this()}); });
  auto meshes = collect_meshes(units);
  // Small meshes first, so that all ranks of the larger ones learn of a difference.
  std::ranges::stable_sort(meshes, {}, [](const DeviceMesh& mesh) { return mesh.size(); });
  const auto where = fmt::format("{}: all ranks are to freeze (requires_grad is false) the same parameters of {}",
                                 units.at(0).state->api(), units[0].state->label());
  check_ranks_agree(meshes, where, [&](const DeviceMesh& mesh) { return frozen_params_on(mesh, units); });
  agrees_on_frozen_ = true;
}

std::shared_ptr<FSDPState> FSDPRoot::state_at(std::optional<int64_t> unit) const {
  return unit ? states_.at(static_cast<size_t>(*unit)).lock() : nullptr;
}

// A forward inside backward is the recomputation of a checkpointed region, and does not change the order.
void FSDPRoot::enter_forward(const FSDPState& state, torch::nn::Module& module) {
  if (current_backward() == -1) {
    thread_ = std::this_thread::get_id();
    if (open_forwards_ == 0) {
      recover();
      for (const auto& stream : gather_streams_) {
        stream->wait_for_current();  // optimizers, loaders and users write shards between iterations
      }
      if (is_outermost(state) && has_shards_ && !agrees_on_frozen_ && at::GradMode::is_enabled()) {
        agree_on_frozen();
      }
      outermost_runs_ = is_outermost(state);
      running_module = &module;
      if (outermost_runs_) {
        schedule_.begin_forward();
      }
    }
    schedule_.record_forward(state.unit());
  } else {
    register_end_of_backward();
  }
  ++open_forwards_;
}

void FSDPRoot::leave_forward(const FSDPState& state) {
  --open_forwards_;
  if (current_backward() != -1) {
    return;
  }
  schedule_.record_forward_end(state.unit());
  if (open_forwards_ == 0) {
    join_search_.forget();
    outermost_runs_ = false;
    running_module = nullptr;
    for_each_live(states_, [](FSDPState& unit) { unit.finish_forward(); });
    await_copies_of_shards();
    end_gathers();
  }
}

/// Waits for copies of shards from the host, which may be written after forward returns if the loss is dropped.
void FSDPRoot::await_copies_of_shards() const {
  const auto offloads = [](const std::weak_ptr<FSDPState>& weak) {
    const auto unit = weak.lock();
    return unit && unit->group() && unit->group()->context().is_offloaded();
  };
  if (std::ranges::any_of(states_, offloads)) {
    for (const auto& stream : gather_streams_) {
      stream->mark().synchronize();
    }
  }
}

void FSDPRoot::end_gathers() const {
  for (const auto& stream : gather_streams_) {
    stream->end_deferred();
  }
}

void FSDPRoot::forward_failed() {
  forward_failed_ = true;
  if (--open_forwards_ == 0) {
    outermost_runs_ = false;
    running_module = nullptr;
  }
}

void FSDPRoot::prefetch_in_forward(FSDPState& state) {
  if (current_backward() != -1) {
    return;
  }
  if (const auto& targets = state.settings().forward_prefetch) {
    for_each_live(*targets, [](FSDPState& unit) { unit.prefetch(); });
    return;
  }
  if (outermost_runs_) {
    if (const auto next = state_at(schedule_.next_in_forward(state.unit()))) {
      next->prefetch();
    }
  }
}

/// If the backward failed, restores the gradients of earlier ones, so that zero_grad() finds them and they do not
/// reappear after it. The remaining cleanup waits for peers and is left to the next forward or backward. All of it is
/// left if a libtorch thread ends the backward (on a GPU), because the caller's thread does not wait for that.
void FSDPRoot::backward_ended(int64_t id) noexcept {
  if (backward_ != id || std::this_thread::get_id() != thread_) {
    return;
  }
  try {
    for_each_live(states_, [](FSDPState& unit) {
      if (unit.group()) {
        unit.group()->gradients().release();
      }
    });
  } catch (...) {  // an exception is already propagating; the next forward cleans up
  }
}

void FSDPRoot::abort_backward() {
  const int64_t failed = std::exchange(backward_, -1);
  shared_gradients_.end();
  for_each_live(states_, [failed](FSDPState& unit) { unit.backward().abort(failed); });
  reductions_.clear();
}

void FSDPRoot::register_end_of_backward() {
  if (!backward_token_.expired()) {
    return;
  }
  if (backward_ != -1) {
    abort_backward();
  }
  if (!agrees_on_frozen_) {
    agree_on_frozen();
  }
  backward_ = current_backward();
  // Expires with the callbacks of a backward, before the caller of a failed one gets the exception.
  const std::shared_ptr<void> token(nullptr, [weak = weak_from_this(), id = backward_](void*) {
    if (const auto self = weak.lock()) {
      self->backward_ended(id);
    }
  });
  backward_token_ = token;
  shared_gradients_.begin();
  schedule_.begin_backward();
  for_each_live(states_, [this](FSDPState& unit) { unit.backward().begin(backward_); });
  at_end_of_backward([weak = weak_from_this(), id = backward_, token] {
    if (const auto self = weak.lock()) {
      self->finish_backward(id);
    }
  });
}

void FSDPRoot::enter_backward(const FSDPState& state) {
  register_end_of_backward();
  schedule_.record_backward(state.unit());
  if (state.group()->gradients().is_reducing()) {
    reductions_.drain();
  }
}

bool FSDPRoot::is_in_outer_backward() const {
  return backward_ == current_backward();
}

void FSDPRoot::prefetch_in_backward(FSDPState& state) {
  if (const auto& targets = state.settings().backward_prefetch) {
    for_each_live(*targets, [](FSDPState& unit) { unit.backward().prefetch(); });
  } else if (const auto next = state_at(schedule_.next_in_backward(state.unit()))) {
    next->backward().prefetch();
  }
}

/// Backward counts as running until everything is done, so that the next forward recovers from an exception here, such
/// as one of a user's reduction.
void FSDPRoot::finish_backward(int64_t id) {
  for (auto state = states_.rbegin(); state != states_.rend(); ++state) {
    if (const auto locked = state->lock()) {
      locked->backward().finish(id);
    }
  }
  end_gathers();
  const auto outermost = states_.front().lock();
  if (!outermost || outermost->settings().is_last_backward) {
    reductions_.drain();
  } else {
    reductions_.flush();
  }
  shared_gradients_.end();
  backward_ = -1;
  backward_token_.reset();
}

/// Recovers from a failed forward, which leaves gathers in flight. It waits for them only now, because peers may not
/// have joined earlier.
void FSDPRoot::recover() {
  if (backward_ != -1) {
    reset_iter_state();
  } else if (forward_failed_) {
    schedule_.abandon();
    for_each_live(states_, [](FSDPState& unit) { unit.finish_forward(); });
  }
  forward_failed_ = false;
}

void FSDPRoot::reset_iter_state() {
  backward_ = -1;
  backward_token_.reset();
  open_forwards_ = 0;
  outermost_runs_ = forward_failed_ = false;
  schedule_.abandon();
  shared_gradients_.end();
  for_each_live(states_, [](FSDPState& unit) { unit.abort_iteration(); });
  reductions_.clear();
}

}  // namespace tessera
