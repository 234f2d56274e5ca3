#include "dtensor/dispatch_scopes.h"

#include <c10/core/AutogradState.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "dtensor/dtensor_impl.h"

namespace tessera {

namespace {

thread_local int implicit_scopes = 0;
thread_local int whole_scopes = 0;
thread_local ExplicitRedistribution::Level explicit_level = ExplicitRedistribution::Level::Off;
thread_local const c10::OperatorHandle* current_op = nullptr;

/// Calls `visit` with every defined tensor of `value`, which may replace it.
template <class Visit>
void visit_tensors(c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      auto tensor = value.toTensor();
      visit(tensor);
      value = std::move(tensor);
    }
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) {
      visit(tensor);
    }
    value = c10::IValue(std::move(tensors));
  } else if (value.isList()) {
    auto list = value.toList().copy();  // Tensor?[]: undefined entries stay
    for (size_t i = 0; i < list.size(); ++i) {
      const c10::IValue& entry = list.get(i);
      if (entry.isTensor() && entry.toTensor().defined()) {
        auto tensor = entry.toTensor();
        visit(tensor);
        list.set(i, c10::IValue(std::move(tensor)));
      }
    }
    value = c10::IValue(list);
  }
}

}  // namespace

detail::BackwardInThisThread::BackwardInThisThread()
    : previous_(c10::AutogradState::get_tls_state().get_multithreading_enabled()) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

detail::BackwardInThisThread::~BackwardInThisThread() {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(previous_);
}

ImplicitReplication::ImplicitReplication() {
  ++implicit_scopes;
}

ImplicitReplication::~ImplicitReplication() {
  --implicit_scopes;
}

bool ImplicitReplication::active() {
  return implicit_scopes > 0;
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

void replicate_plain_tensors(torch::jit::Stack* stack, size_t num_arguments) {
  const DTensorMeta* first = nullptr;
  const size_t begin = stack->size() - num_arguments;
  for (size_t i = begin; i < stack->size(); ++i) {
    visit_tensors((*stack)[i], [&](const at::Tensor& tensor) { first = first ? first : dtensor_meta(tensor); });
  }
  if (!first) {
    return;
  }
  const auto mesh = first->spec->mesh();
  const Placements replicated(static_cast<size_t>(mesh.ndim()), Replicate());
  for (size_t i = begin; i < stack->size(); ++i) {
    visit_tensors((*stack)[i], [&](at::Tensor& tensor) {
      if (!dtensor_meta(tensor) && tensor.dim() > 0) {
        tensor = wrap_local(tensor, DTensorSpec::make(mesh, replicated, TensorMeta::of(tensor)));
      }
    });
  }
}

}  // namespace tessera
