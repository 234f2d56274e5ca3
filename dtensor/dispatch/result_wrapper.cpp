#include "dtensor/dispatch/result_wrapper.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "dtensor/dispatch/local_arguments.h"

namespace tessera {

SpecPtr spec_of_result(const OpPlan& plan, size_t next, const at::Tensor& result) {
  if (plan.outputs_from_results) {
    const auto planned = std::find_if(plan.operands.begin(), plan.operands.end(), [](const auto& p) { return p; });
    return DTensorSpec::make((*planned)->mesh(), Placements((*planned)->placements().size(), Replicate()),
                             TensorMeta::of(result));
  }
  TESSERA_ASSERT(next < plan.outputs.size(), "result {} of {} is not planned", next, plan.outputs.size());
  return plan.outputs[next];
}

at::Tensor laid_out_as(at::Tensor local, const TensorMeta& whole) {
  if (whole.is_contiguous()) {
    return local.contiguous();
  }
  const auto in_order = [&](size_t a, size_t b) {
    const bool can_tell = local.size(a) > 1 && local.size(b) > 1 && whole.strides[b] > 0;  // 0: an expanded dim
    return !can_tell || whole.strides[a] <= whole.strides[b] || local.stride(a) >= local.stride(b);
  };
  for (size_t a = 0; a < whole.strides.size(); ++a) {
    for (size_t b = 0; b < whole.strides.size(); ++b) {
      if (!in_order(a, b)) {
        return at::empty_strided(local.sizes(), local_strides(local.sizes(), whole.strides), local.options())
            .copy_(local);
      }
    }
  }
  return local;
}

at::Tensor ResultWrapper::wrap_view(at::Tensor local, SpecPtr spec, size_t index) const {
  const auto& operand = call.operands[0];
  const auto* viewed = operand.dtensor;
  // A view is an inference tensor if the viewed one is, in any mode, as autograd asserts.
  std::optional<c10::InferenceMode> mode;
  if (operand.tensor->is_inference() != c10::InferenceMode::is_enabled()) {
    mode.emplace(operand.tensor->is_inference());
  }
  // If the viewed tensor was moved, it is a copy, and so are its views. So is a view that local strides do not allow.
  const bool copied = viewed && (plan.redistribute[0] || viewed->materialized_view || plan.rule->views_are_copies ||
                                 (local.numel() > 0 && !local.is_alias_of(viewed->local)));
  const auto elements =
      call.info->views_same_elements ? MaterializedView::Elements::Same : MaterializedView::Elements::Other;
  auto view = wrap_local(std::move(local), std::move(spec), viewed ? viewed->origin : nullptr,
                         copied ? MaterializedView::of(*operand.tensor, elements) : MaterializedView());
  const int64_t begin = viewed && call.args[operand.arg].isTensor() ? operand.tensor->storage_offset() : 0;
  const int64_t offset = index < plan.offsets.size() ? plan.offsets[index] : 0;
  view.unsafeGetTensorImpl()->set_storage_offset(begin + offset);
  return view;
}

void wrap_results(const CallSignature& call, const OpPlan& plan, torch::jit::Stack* stack) {
  const auto& returns = call.info->returns;
  const size_t first = stack->size() - returns.size();
  ResultWrapper wrapper{call, plan};
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (returns[i].written_arg >= 0) {
      value = call.args[static_cast<size_t>(returns[i].written_arg)];
      ++wrapper.next;
    } else if (value.isTensor()) {
      if (value.toTensor().defined()) {
        value = wrapper.wrap(std::move(value).toTensor(), returns[i].is_view);
      }
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) {
        tensor = wrapper.wrap(std::move(tensor), returns[i].is_view);
      }
      value = c10::IValue(std::move(tensors));
    }
  }
}

}  // namespace tessera
