#include "dtensor/replicate_plain.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>

#include "dtensor/call_signature.h"
#include "dtensor/dispatch_checks.h"
#include "dtensor/dtensor.h"
#include "dtensor/dtensor_impl.h"

namespace tessera {

namespace {

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

Placements copies_on(const DeviceMesh& mesh) {
  return Placements(static_cast<size_t>(mesh.ndim()), Replicate());
}

/// Whether autograd is to know that a plain tensor becomes a DTensor.
bool is_recorded(const at::Tensor& plain) {
  return plain.requires_grad() && at::GradMode::is_enabled();
}

/// Replaces the plain tensors of at least one dim, and those that `as_copy` records, by what it makes of them for the
/// first DTensor's mesh.
template <class AsCopy>
void replace_plain_tensors(torch::jit::Stack* stack, size_t num_arguments, bool records, AsCopy as_copy) {
  const DTensorMeta* first = nullptr;
  const size_t begin = stack->size() - num_arguments;
  for (size_t i = begin; i < stack->size(); ++i) {
    visit_tensors((*stack)[i], [&](const at::Tensor& tensor) { first = first ? first : dtensor_meta(tensor); });
  }
  if (!first) {
    return;
  }
  const auto mesh = first->spec->mesh();
  for (size_t i = begin; i < stack->size(); ++i) {
    visit_tensors((*stack)[i], [&](at::Tensor& tensor) {
      if (!dtensor_meta(tensor) && (tensor.dim() > 0 || (records && is_recorded(tensor)))) {
        tensor = as_copy(tensor, mesh);
      }
    });
  }
}

/// With the way back, by which a plain leaf gets a plain gradient.
at::Tensor recorded(const at::Tensor& plain, const DeviceMesh& mesh) {
  return is_recorded(plain) ? from_local(plain, mesh, copies_on(mesh)) : replicated(plain, mesh);
}

/// Ops that ATen composes, also of DTensors, call others, which come here too.
bool is_composed(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
}

/// In a way that a scope allows.
bool mixes_plain_tensors(const c10::OperatorHandle& op, const torch::jit::Stack& stack, bool records) {
  const auto& info = OpInfo::of(op);
  const CallSignature call(info, torch::jit::last(stack, info.kinds.size()));
  const auto is_number_to_record = [&](const CallOperand& operand) {
    return !operand.dtensor && operand.tensor->dim() == 0 && is_recorded(*operand.tensor);
  };
  return (call.mixed || (records && std::ranges::any_of(call.operands, is_number_to_record))) &&
         may_replicate_plain_tensors(call);
}

void replicate_above_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool records = keys.has_any(c10::autograd_dispatch_keyset);
  if (!is_composed(op) && mixes_plain_tensors(op, *stack, records)) {
    replace_plain_tensors(stack, op.schema().arguments().size(), records, records ? recorded : replicated);
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kReplicatingKey), stack);
}

}  // namespace

at::Tensor replicated(const at::Tensor& plain, const DeviceMesh& mesh) {
  auto copy = wrap_local(plain, DTensorSpec::make(mesh, copies_on(mesh), TensorMeta::of(plain)));
  if (!plain.is_inference() && !copy.is_inference()) {
    copy.unsafeGetTensorImpl()->set_version_counter(plain.unsafeGetTensorImpl()->version_counter());
  }
  return copy;
}

void replicate_plain_tensors(torch::jit::Stack* stack, size_t num_arguments) {
  replace_plain_tensors(stack, num_arguments, /*records=*/false, replicated);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&replicate_above_autograd>());
}

}  // namespace tessera
