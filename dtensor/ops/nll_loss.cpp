// Negative log-likelihood over a cut batch. Its mean divides by the total weight of the targets that are not
// ignored, which no rank can tell from its part of the targets. So for a mean the targets (one integer an item)
// are replicated: every rank knows the total, and the local sums form a pending sum.

#include <ATen/ops/zeros.h>

#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

constexpr int64_t kMean = 1;
constexpr int64_t kSum = 2;

// Arguments of both forwards: (self, target, weight, reduction, ignore_index).
constexpr size_t kWeight = 2;
constexpr size_t kReduction = 3;
constexpr size_t kIgnoreIndex = 4;

/// self is [N, C, ...], target [N, ...]: the target's dim that is self's dim `dim`; kNone for the classes.
int64_t target_dim(int64_t dim) {
  return dim == 0 ? 0 : dim == 1 ? kNone : dim - 1;
}

std::vector<TensorMeta> nll_loss2d_metas(const OpCall& call) {
  const auto dtype = call.operands[0].meta.dtype;
  const bool per_item = call.args[kReduction].toInt() == 0;
  return {TensorMeta::contiguous(per_item ? call.operands[1].meta.sizes : DimVector(), dtype),
          TensorMeta::contiguous({}, dtype)};
}

Strategies nll_loss_strategies(const OpCall& call) {
  Strategies strategies;
  const int64_t reduction = call.args[kReduction].toInt();
  for (int64_t dim = 0; call.operands[0].ndim() > 1 && dim < call.operands[0].ndim(); ++dim) {
    const int64_t in_target = target_dim(dim);
    if (in_target == kNone) {
      continue;
    }
    AxisStrategy strategy{.operands = PlacementVector(call.operands.size(), Replicate()),
                          .outputs = {Shard(in_target), Replicate()}};
    strategy.operands[0] = Shard(dim);
    if (reduction != kMean) {
      strategy.operands[1] = Shard(in_target);
    }
    if (reduction == kSum) {
      strategy.outputs = {Partial(), Partial()};
    } else if (reduction == kMean) {
      strategy.outputs = {Partial(), Replicate()};
    }
    strategies.push_back(std::move(strategy));
  }
  return strategies;
}

/// The weight that the mean divides by, from the whole target.
at::Tensor total_weight(const at::Tensor& target, const at::Tensor& weight, int64_t ignore_index,
                        at::ScalarType dtype) {
  const auto counted = target.ne(ignore_index);
  if (!weight.defined()) {
    return counted.sum().to(dtype);
  }
  const auto classes = target.masked_fill(counted.logical_not(), 0);
  return weight.index_select(0, classes.flatten()).mul(counted.flatten()).sum();
}

/// This rank's part of a replicated target.
at::Tensor own_target(at::Tensor target, const SpecPtr& self) {
  for (int64_t dim = 0; dim < self->ndim(); ++dim) {
    if (target_dim(dim) != kNone) {
      const auto range = range_of(self, dim);
      target = target.narrow(target_dim(dim), range.offset, range.length);
    }
  }
  return target.contiguous();
}

void local_nll_loss(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const bool mean = local_argument(op, stack, kReduction).toInt() == kMean && plan.outputs[0]->has_partial();
  const auto self = local_argument(op, stack, 0).toTensor();
  auto& target = local_argument(op, stack, 1);
  at::Tensor total;
  if (mean) {
    const auto& weight = local_argument(op, stack, kWeight);
    total = total_weight(target.toTensor(), weight.isTensor() ? weight.toTensor() : at::Tensor(),
                         local_argument(op, stack, kIgnoreIndex).toInt(), self.scalar_type());
    target = own_target(target.toTensor(), plan.operands[0]);
    local_argument(op, stack, kReduction) = c10::IValue(kSum);
  }
  if (self.numel() == 0) {
    set_results(op, stack, {at::zeros(plan.outputs[0]->local_sizes(), self.options()), at::zeros({}, self.options())});
  } else {
    op.callBoxed(stack);
  }
  if (mean) {
    const auto sum = (*stack)[stack->size() - 2].toTensor();
    (*stack)[stack->size() - 2] = sum.div(total);
    stack->back() = total;
  }
}

/// (grad, self, target, weight, reduction, ignore_index, total_weight): the global total comes with the call.
Strategies nll_loss_backward_strategies(const OpCall& call) {
  Strategies strategies;
  const bool per_item = call.operands[0].ndim() > 0;
  for (int64_t dim = 0; call.operands[1].ndim() > 1 && dim < call.operands[1].ndim(); ++dim) {
    if (target_dim(dim) != kNone) {
      DimVector operands(call.operands.size(), kNone);
      operands[0] = per_item ? target_dim(dim) : kNone;
      operands[1] = dim;
      operands[2] = target_dim(dim);
      strategies.push_back(sharded(call, operands, {dim}));
    }
  }
  keep_linear(strategies, call, 0);
  return strategies;
}

void local_nll_loss_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& /*plan*/) {
  const auto self = local_argument(op, stack, 1).toTensor();
  if (self.numel() == 0) {
    set_results(op, stack, {at::zeros(self.sizes(), self.options())});
  } else {
    op.callBoxed(stack);
  }
}

const RegisterOpRules rules([] {
  register_op_rule({"aten::nll_loss_forward"}, {.strategies = nll_loss_strategies, .local_call = local_nll_loss});
  register_op_rule({"aten::nll_loss2d_forward"},
                   {.strategies = nll_loss_strategies, .local_call = local_nll_loss, .output_metas = nll_loss2d_metas});
  register_op_rule({"aten::nll_loss_backward", "aten::nll_loss2d_backward"},
                   {.strategies = nll_loss_backward_strategies,
                    .local_call = local_nll_loss_backward,
                    .output_metas = like_operand(1)});
});

}  // namespace

}  // namespace tessera
