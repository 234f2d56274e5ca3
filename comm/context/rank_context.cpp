#include "comm/context/rank_context.h"

#include "comm/context/rank_state.h"

namespace tessera {

namespace {

thread_local detail::RankState* entered_state = nullptr;

struct ProcessState {
  std::shared_ptr<detail::RankState> owner = std::make_shared<detail::RankState>(0);
  std::atomic<detail::RankState*> current = owner.get();
};

// Never destroyed, because a group's threads may still run while the process's statics are destroyed.
ProcessState& process_state() {
  static auto* const state = new ProcessState;
  return *state;
}

std::shared_ptr<detail::RankState> new_state() {
  static std::atomic<uint64_t> count{0};
  return std::make_shared<detail::RankState>(++count);
}

}  // namespace

namespace detail {

RankState& rank_state() {
  return entered_state ? *entered_state : *process_state().current.load(std::memory_order_acquire);
}

void renew_process_state() {
  auto state = new_state();
  process_state().current.store(state.get(), std::memory_order_release);
  std::swap(process_state().owner, state);
}

std::shared_ptr<void> rank_local(std::type_index type, std::shared_ptr<void> (*make)()) {
  RankState& state = rank_state();
  std::lock_guard lock(state.locals_mutex);
  auto& local = state.locals[type];
  if (!local) {
    local = make();
  }
  return local;
}

}  // namespace detail

RankContext RankContext::create() {
  return RankContext(new_state());
}

RankContext RankContext::current() {
  return RankContext(detail::rank_state().shared_from_this());
}

RankContextGuard::RankContextGuard(const RankContext& context) : entered_(context.state_), previous_(entered_state) {
  entered_state = entered_.get();
}

RankContextGuard::~RankContextGuard() {
  entered_state = previous_;
}

uint64_t rank_context_id() {
  const detail::RankState& state = detail::rank_state();
  return state.init_count == 0 ? 0 : (state.number << 32) + state.init_count;
}

}  // namespace tessera
