// ImplicitReplication above autograd: registers the fallback that a scope enables (dispatch_scopes.h).

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>

#include "dtensor/dispatch/call_signature.h"
#include "dtensor/dispatch/dispatch_checks.h"
#include "dtensor/dispatch/implicit_replication.h"
#include "dtensor/dtensor.h"

namespace tessera {

namespace {

/// Differentiable replication, by which a plain leaf gets a plain gradient.
at::Tensor recorded(const at::Tensor& plain, const DeviceMesh& mesh) {
  return has_gradient_to_record(plain) ? from_local(plain, mesh, copies_on(mesh)) : replicated(plain, mesh);
}

/// Returns whether ATen composes the op, also for DTensors, from other ops, which get here too.
bool is_composed(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
}

/// Returns whether the call mixes plain tensors with DTensors in a way that a scope allows.
bool mixes_plain_tensors(const c10::OperatorHandle& op, const torch::jit::Stack& stack, bool records) {
  const auto& info = OpInfo::of(op);
  const CallSignature call(info, torch::jit::last(stack, info.kinds.size()));
  const auto is_number_to_record = [&](const CallOperand& operand) {
    return !operand.dtensor && operand.tensor->dim() == 0 && has_gradient_to_record(*operand.tensor);
  };
  return (call.mixed || (records && std::ranges::any_of(call.operands, is_number_to_record))) &&
         may_replicate_implicitly(call);
}

void replicate_above_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool records = keys.has_any(c10::autograd_dispatch_keyset);
  if (!is_composed(op) && mixes_plain_tensors(op, *stack, records)) {
    replace_plain_tensors(stack, op.schema().arguments().size(), records, records ? recorded : replicated);
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kReplicatingKey), stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&replicate_above_autograd>());
}

}  // namespace tessera
