// Losses that compare two tensors elementwise and then reduce. A mean divides by the global number of elements, not the
// local one.

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Reduction.h>

#include <algorithm>

#include "base/error.h"
#include "comm/collectives.h"
#include "dtensor/ops/pointwise/pointwise.h"
#include "dtensor/ops/rule_helpers.h"
#include "dtensor/propagation/output_metas.h"

namespace tessera {

namespace {

size_t reduction_argument(const c10::OperatorHandle& op) {
  return static_cast<size_t>(op.schema().argumentIndexWithName("reduction").value());
}

int64_t loss_reduction(const OpCall& call) {
  return call.args[reduction_argument(call.op)].toInt();
}

/// Strategies for the part before the reduction: operands `first` (input) and `first + 1` (target), broadcast.
template <size_t first>
DimVector elements(const OpCall& call) {
  return broadcast_sizes(call.operands[first].meta, call.operands[first + 1].meta);
}

/// Some losses have the dtype of the input, others the wider one; gradients have that of their operand.
at::ScalarType result_dtype(const OpCall& call) {
  return infer_output_dtypes(call).at(0);
}

int64_t count(const OpPlan& plan, std::initializer_list<size_t> broadcast_operands) {
  DimVector sizes;
  for (const size_t operand : broadcast_operands) {
    if (plan.operands[operand]) {
      const auto wider = at::infer_size_dimvector(sizes, plan.operands[operand]->sizes());
      sizes.assign(wider.begin(), wider.end());
    }
  }
  return c10::multiply_integers(sizes);
}

/// Returns null for an omitted optional argument.
const TensorMeta* argument_meta(const OpCall& call, const char* name) {
  const auto index = call.op.schema().argumentIndexWithName(name);
  const auto found = std::ranges::find_if(
      call.operands, [&](const Operand& operand) { return index && operand.arg == static_cast<size_t>(*index); });
  return found == call.operands.end() ? nullptr : &found->meta;
}

void check_expands(const OpCall& call, const TensorMeta* meta, const char* what, const TensorMeta& to) {
  TESSERA_CHECK(ValueError, !meta || at::is_expandable_to(meta->sizes, to.sizes),
                "{}: {} {} does not broadcast to {}, which has the sizes of the loss",
                toString(call.op.operator_name()), what, meta ? to_string(*meta) : "", to_string(to));
}

/// Checks sizes of full tensors, because the local ones may fit. Most kernels accept tensors that broadcast; those of
/// binary_cross_entropy compare element i with element i regardless of sizes, so these must be equal.
void check_sizes(const OpCall& call) {
  const auto& name = call.op.operator_name().name;
  const auto* input = argument_meta(call, "self");
  const auto* target = argument_meta(call, "target");
  const bool is_of_logits = name == "aten::binary_cross_entropy_with_logits";
  if (name == "aten::soft_margin_loss") {
    check_expands(call, target, "target", *input);
  } else if (is_of_logits) {
    check_expands(call, input, "input", *target);
  } else if (name == "aten::binary_cross_entropy" || name == "aten::binary_cross_entropy_backward") {
    TESSERA_CHECK(ValueError, input->sizes == target->sizes, "{}: input {} and target {}; they need the same sizes",
                  name, to_string(*input), to_string(*target));
  }
  if (is_of_logits && argument_meta(call, "pos_weight")) {
    check_expands(call, target, "with pos_weight, target", *input);
    check_expands(call, argument_meta(call, "pos_weight"), "pos_weight", *input);
  }
  check_expands(call, argument_meta(call, "weight"), "weight", *target);
}

std::vector<TensorMeta> loss_metas(const OpCall& call) {
  check_sizes(call);
  const auto dtype = c10::promoteTypes(call.operands[0].meta.dtype, call.operands[1].meta.dtype);
  TESSERA_CHECK(ValueError,
                loss_reduction(call) != at::Reduction::Mean || !c10::isIntegralType(dtype, /*includeBool=*/true),
                "{}: the mean of a loss of {}; pass tensors of a floating dtype", toString(call.op.operator_name()),
                c10::toString(dtype));
  const auto sizes = elements<0>(call);
  return {
      TensorMeta::contiguous(loss_reduction(call) == at::Reduction::None ? sizes : DimVector(), result_dtype(call))};
}

Strategies loss_strategies(const OpCall& call) {
  auto strategies = pointwise_strategies(call, TensorMeta::contiguous(elements<0>(call), call.outputs.at(0).dtype));
  if (loss_reduction(call) != at::Reduction::None) {
    for (auto& strategy : strategies) {
      strategy.outputs[0] = Partial();
    }
  }
  return strategies;
}

/// Runs the loss. The sum of a mean may exceed 16 bits where the mean does not, so it is accumulated like in kernels.
void local_loss(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  auto& reduction = local_argument(op, stack, reduction_argument(op));
  const bool mean = reduction.toInt() == at::Reduction::Mean && plan.outputs[0]->has_partial();
  if (mean) {
    reduction = c10::IValue(int64_t{at::Reduction::None});
  }
  op.callBoxed(stack);
  if (mean) {
    const auto losses = stack->back().toTensor();
    const auto sum = losses.sum(at::toOpMathType(losses.scalar_type()));
    stack->back() = sum.div(count(plan, {0, 1})).to(plan.outputs[0]->dtype());
  }
}

/// Returns the axes along which any operand is sharded.
std::vector<int64_t> sharding_axes(const OpPlan& plan) {
  std::vector<int64_t> axes;
  const auto& mesh = plan.outputs[0]->mesh();
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    const bool is_sharded = std::ranges::any_of(plan.operands, [&](const SpecPtr& spec) {
      return spec && spec->placements()[static_cast<size_t>(axis)].is_shard();
    });
    if (is_sharded && mesh.shape()[static_cast<size_t>(axis)] > 1) {
      axes.push_back(axis);
    }
  }
  return axes;
}

/// Checks for values that are not probabilities on all ranks together. CPU kernels would do so only for this rank's
/// shard.
void check_probabilities(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto axes = sharding_axes(plan);
  if (axes.empty()) {
    return;
  }
  const auto has_others = [](const at::Tensor& local) {
    return local.ge(0).logical_and_(local.le(1)).logical_not_().any();
  };
  const auto others = has_others(local_argument(op, stack, 0).toTensor())
                          .logical_or_(has_others(local_argument(op, stack, 1).toTensor()));
  for (const int64_t axis : axes) {
    all_reduce(others, ReduceOp::Max, plan.outputs[0]->mesh().group(axis));
  }
  TESSERA_CHECK(ValueError, !others.item<bool>(),
                "aten::binary_cross_entropy: input and target are from 0 to 1, and some are not; for logits call "
                "binary_cross_entropy_with_logits");
}

void local_binary_cross_entropy(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  if (local_argument(op, stack, 0).toTensor().is_cpu()) {
    check_probabilities(op, stack, plan);
  }
  local_loss(op, stack, plan);
}

std::vector<TensorMeta> loss_backward_metas(const OpCall& call) {
  check_sizes(call);
  return {TensorMeta::contiguous(elements<1>(call), result_dtype(call))};
}

Strategies loss_backward_strategies(const OpCall& call) {
  auto strategies = pointwise_strategies(call, call.outputs[0]);
  keep_linear(strategies, call, 0);
  return strategies;
}

/// Runs the backward. ATen divides by the number of elements of `self`, even if it was broadcast to the target. Before
/// that division, values may exceed 16 bits.
void local_loss_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  auto& reduction = local_argument(op, stack, reduction_argument(op));
  const bool mean = reduction.toInt() == at::Reduction::Mean && !plan.outputs[0]->is_replicated();
  if (mean) {
    reduction = c10::IValue(int64_t{at::Reduction::Sum});
    for (size_t arg = 0; arg < op.schema().arguments().size(); ++arg) {
      widen(local_argument(op, stack, arg));
    }
  }
  op.callBoxed(stack);
  if (mean) {
    stack->back() = stack->back().toTensor().div(count(plan, {1})).to(plan.outputs[0]->dtype());
  }
}

const RegisterOpRules loss_rules([] {
  register_op_rule({"aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss",
                    "aten::binary_cross_entropy_with_logits", "aten::soft_margin_loss"},
                   {.strategies = loss_strategies, .local_call = local_loss, .output_metas = loss_metas});
  register_op_rule({"aten::binary_cross_entropy"}, {.strategies = loss_strategies,
                                                    .local_call = local_binary_cross_entropy,
                                                    .output_metas = loss_metas,
                                                    .runs_on_empty_shards = true});
  register_op_rule(
      {"aten::mse_loss_backward", "aten::smooth_l1_loss_backward", "aten::huber_loss_backward",
       "aten::binary_cross_entropy_backward", "aten::soft_margin_loss_backward"},
      {.strategies = loss_backward_strategies, .local_call = local_loss_backward, .output_metas = loss_backward_metas});
});

}  // namespace

}  // namespace tessera
