// New tensors with the dtype and device, and possibly the sizes, of another one.

#include "dtensor/dispatch/local_arguments.h"
#include "dtensor/ops/rule_helpers.h"
#include "dtensor/propagation/fill_check.h"

namespace tessera {

namespace {

/// The operand never moves, because its values do not matter. A result with its sizes has its placements; others are
/// replicated. A result like a Partial tensor is also replicated, because writes to it would become terms of the
/// operand's reduction, except zeros, which are the terms of a zero. There is no average of integers, and no maximum of
/// complex numbers.
template <bool zeros>
Strategies factory_strategies(const OpCall& call) {
  const auto& operand = call.operands[0];
  const Placement current = operand.spec->placements()[call.axis];
  const bool may_wait = zeros && !current.is_norm_partial() && call.outputs[0].dtype == operand.meta.dtype;
  const bool alike = call.outputs[0].sizes == operand.meta.sizes && (current.is_shard() || may_wait);
  return {{.operands = {current}, .outputs = {alike ? current : Placement(Replicate())}}};
}

/// Makes local strides in the order of the global ones, without gaps.
void local_empty_strided(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto sizes = plan.outputs[0]->local_sizes();
  const auto strides = local_strides(sizes, plan.outputs[0]->strides());
  local_argument(op, stack, 1) = c10::IValue(sizes);
  local_argument(op, stack, 2) = c10::IValue(at::IntArrayRef(strides));
  op.callBoxed(stack);
}

void local_new_full(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto value = local_argument(op, stack, 2).toScalar();
  with_local_sizes(1)(op, stack, plan);
  check_fill(stack->back().toTensor(), c10::multiply_integers(plan.outputs[0]->sizes()), value);
}

const RegisterOpRules factory_rules([] {
  register_op_rule({"aten::new_zeros"}, {.strategies = factory_strategies<true>, .local_call = with_local_sizes(1)});
  register_op_rule({"aten::new_empty", "aten::new_ones"},
                   {.strategies = factory_strategies<false>, .local_call = with_local_sizes(1)});
  register_op_rule(
      {"aten::new_full"},
      {.strategies = factory_strategies<false>, .local_call = local_new_full, .runs_on_empty_shards = true});
  register_op_rule({"aten::new_empty_strided"},
                   {.strategies = factory_strategies<false>, .local_call = local_empty_strided});
});

}  // namespace

}  // namespace tessera
