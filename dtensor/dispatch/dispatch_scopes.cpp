#include "dtensor/dispatch/dispatch_scopes.h"

#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "dtensor/dispatch/implicit_replication.h"

namespace tessera {

namespace {

thread_local int whole_scopes = 0;
thread_local ExplicitRedistribution::Level explicit_level = ExplicitRedistribution::Level::Off;
thread_local const c10::OperatorHandle* current_op = nullptr;

}  // namespace

detail::BackwardInThisThread::BackwardInThisThread()
    : previous_(c10::AutogradState::get_tls_state().get_multithreading_enabled()) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

detail::BackwardInThisThread::~BackwardInThisThread() {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(previous_);
}

ImplicitReplication::ImplicitReplication() : was_active_(active()) {
  c10::impl::tls_set_dispatch_key_excluded(kReplicatingKey, false);
}

ImplicitReplication::~ImplicitReplication() {
  c10::impl::tls_set_dispatch_key_excluded(kReplicatingKey, !was_active_);
}

bool ImplicitReplication::active() {
  return !c10::impl::tls_is_dispatch_key_excluded(kReplicatingKey);
}

ExplicitRedistribution::ExplicitRedistribution(bool strict)
    : ExplicitRedistribution(strict ? Level::Strict : Level::Communication) {}

ExplicitRedistribution::ExplicitRedistribution(Level level) : previous_(std::exchange(explicit_level, level)) {}

ExplicitRedistribution::~ExplicitRedistribution() {
  explicit_level = previous_;
}

ExplicitRedistribution::Level ExplicitRedistribution::level() {
  return explicit_level;
}

bool ExplicitRedistribution::forbids(const std::vector<RedistributeStep>& steps, const DeviceMesh& mesh) {
  switch (explicit_level) {
    case Level::Off:
      return false;
    case Level::Communication:
      return std::ranges::any_of(steps, [&](const RedistributeStep& step) {
        return step.communicates() && mesh.size(static_cast<int64_t>(step.axis)) > 1;
      });
    case Level::Strict:
      return !steps.empty();
  }
  TESSERA_ASSERT(false, "level {}", static_cast<int>(explicit_level));
}

ReplicateAndRun::ReplicateAndRun() {
  ++whole_scopes;
}

ReplicateAndRun::~ReplicateAndRun() {
  --whole_scopes;
}

bool ReplicateAndRun::active() {
  return whole_scopes > 0;
}

const c10::OperatorHandle* dispatching_op() {
  return current_op;
}

DispatchingOp::DispatchingOp(const c10::OperatorHandle& op) : previous_(std::exchange(current_op, &op)) {}

DispatchingOp::~DispatchingOp() {
  current_op = previous_;
}

}  // namespace tessera
