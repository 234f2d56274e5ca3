#include "dtensor/dispatch/implicit_replication.h"

#include <ATen/core/grad_mode.h>

#include "dtensor/local/dtensor_impl.h"

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

}  // namespace

Placements copies_on(const DeviceMesh& mesh) {
  return Placements(static_cast<size_t>(mesh.ndim()), Replicate());
}

bool has_gradient_to_record(const at::Tensor& plain) {
  return plain.requires_grad() && at::GradMode::is_enabled();
}

at::Tensor replicated(const at::Tensor& plain, const DeviceMesh& mesh) {
  auto copy = wrap_local(plain, DTensorSpec::make(mesh, copies_on(mesh), TensorMeta::of(plain)));
  if (!plain.is_inference() && !copy.is_inference()) {
    copy.unsafeGetTensorImpl()->set_version_counter(plain.unsafeGetTensorImpl()->version_counter());
  }
  return copy;
}

void replace_plain_tensors(torch::jit::Stack* stack, size_t num_arguments, bool records, MakeReplicated as_copy) {
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
      if (!dtensor_meta(tensor) && (tensor.dim() > 0 || (records && has_gradient_to_record(tensor)))) {
        tensor = as_copy(tensor, mesh);
      }
    });
  }
}

void apply_implicit_replication(torch::jit::Stack* stack, size_t num_arguments) {
  replace_plain_tensors(stack, num_arguments, /*records=*/false, replicated);
}

}  // namespace tessera
