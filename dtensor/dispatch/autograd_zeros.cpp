#include "dtensor/dispatch/autograd_zeros.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/from_local_checks.h"

namespace tessera {

namespace {

/// Returns whether no other tensor sees writes to this one, as with tensors that autograd adds to in place.
bool has_own_memory(const at::Tensor& plain) {
  return plain.has_storage() && plain.storage().use_count() == 1;
}

}  // namespace

bool add_zeros_of_autograd(const c10::OperatorHandle& op, const CallSignature& call, torch::jit::Stack* stack) {
  const auto& name = op.operator_name();
  const bool writes = name.name == "aten::add_";
  if (torch::autograd::get_current_graph_task_id() == -1 || !(writes || name.name == "aten::add") ||
      name.overload_name != "Tensor" || call.operands.size() != 2 || !call.args[2].toScalar().equal(1)) {
    return false;
  }
  const auto& first = *call.operands[0].tensor;
  const auto& second = *call.operands[1].tensor;
  const bool is_first_plain = !call.operands[0].dtensor;
  const auto& zeros = is_first_plain ? first : second;
  const auto& sum = is_first_plain ? second : first;
  if (zeros.sizes() != sum.sizes() || zeros.scalar_type() != sum.scalar_type()) {
    return false;
  }
  const bool becomes_dtensor = writes && is_first_plain;
  const bool can_add = !zeros.any().item<bool>() && (!becomes_dtensor || has_own_memory(zeros));
  if (!same_on_all_ranks({can_add}, dtensor_meta(sum)->spec->mesh()) || !can_add) {
    return false;
  }
  if (writes && !is_first_plain) {
    stack->emplace_back(first);
    return true;
  }
  auto result = sum.clone();  // dense, even if `sum` is a view with gaps
  if (becomes_dtensor) {
    first.unsafeGetTensorImpl()->shallow_copy_from(result.getIntrusivePtr());
    result = first;
  }
  stack->emplace_back(std::move(result));
  return true;
}

bool has_empty_gradients(const CallSignature& call) {
  return torch::autograd::get_current_graph_task_id() != -1 &&
         std::ranges::all_of(call.operands, [](const CallOperand& operand) {
           return operand.dtensor || operand.tensor->dim() == 0 || operand.tensor->numel() == 0;
         });
}

}  // namespace tessera
