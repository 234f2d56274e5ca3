// Fused optimizer steps: parameter, gradient and states of one place are cut alike, which optimizers do anyway; then
// the step is one local call without communication. Whatever lies otherwise is moved, and written states moved back.

#include <algorithm>

#include "dtensor/ops/list_parts.h"
#include "dtensor/ops/pointwise.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

/// The step counts have no dims and so are replicated.
Strategies step_strategies(const OpCall& part) {
  return pointwise_strategies(part, part.operands[0].meta);
}

/// Kernels are not called on parameters of which this rank has nothing.
void local_step(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& /*plan*/) {
  const auto has_elements = [](const c10::IValue& tensor) { return tensor.toTensor().numel() > 0; };
  const auto params = local_argument(op, stack, 0).toListRef();
  if (std::all_of(params.begin(), params.end(), has_elements)) {
    op.callBoxed(stack);
    return;
  }
  const auto parameters = local_argument(op, stack, 0).toTensorVector();
  const size_t num_args = op.schema().arguments().size();
  bool any = false;
  for (size_t arg = 0; arg < num_args; ++arg) {
    auto& value = local_argument(op, stack, arg);
    if (!value.isTensorList() || value.toTensorList().size() != parameters.size()) {
      continue;
    }
    std::vector<at::Tensor> kept;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].numel() > 0) {
        kept.push_back(value.toTensorList().get(i));
        any = true;
      }
    }
    value = c10::IValue(std::move(kept));
  }
  if (any) {
    op.callBoxed(stack);
  } else {
    torch::jit::drop(*stack, num_args);
  }
}

const RegisterOpRules rules([] {
  auto rule = rule_by_parts(step_strategies);
  rule.local_call = local_step;
  rule.output_metas = [](const OpCall&) { return std::vector<TensorMeta>(); };
  for (const char* optimizer : {"adam", "adamw", "sgd", "adagrad"}) {
    const std::string name = std::string("aten::_fused_") + optimizer + "_";
    register_op_rule({name, name + ".tensor_lr"}, rule);
  }
});

}  // namespace

}  // namespace tessera
