// Negative log-likelihood with a sharded batch, sharded classes, or both.
//
// Its mean divides by the total weight of the targets that are not ignored, which no rank can compute from its shard of
// the targets. For a mean, the targets (one integer per item) are therefore replicated: every rank knows the total, and
// the local sums are Partial. With sharded classes, each rank counts the targets among its own classes, like a
// vocabulary-parallel embedding looks up its own rows, and the log-probabilities are not moved.

#include <ATen/core/Reduction.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "base/error.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

// Arguments of both forwards: (self, target, weight, reduction, ignore_index).
constexpr size_t kWeight = 2;
constexpr size_t kReduction = 3;
constexpr size_t kIgnoreIndex = 4;

// Target that no class of this rank has, which local kernels ignore.
constexpr int64_t kElsewhere = -100;

/// self is [N, C, ...], or [C] for one item.
int64_t class_dim(int64_t self_ndim) {
  return self_ndim == 1 ? 0 : 1;
}

int64_t num_classes(const SpecPtr& self) {
  return self->sizes()[static_cast<size_t>(class_dim(self->ndim()))];
}

/// Returns the reduction of a forward. For one item without a reduction, kernels return a total weight as for a sum.
int64_t nll_reduction(const OpCall& call) {
  const int64_t reduction = call.args[kReduction].toInt();
  return reduction != at::Reduction::Mean && call.operands[0].ndim() == 1 ? int64_t{at::Reduction::Sum} : reduction;
}

/// Returns the dim of target [N, ...] for dim `dim` of self; kNone for the classes.
int64_t target_dim(int64_t dim, int64_t self_ndim) {
  return dim == class_dim(self_ndim) ? kNone : dim == 0 ? 0 : dim - 1;
}

/// Checks sizes, because kernels compare only those of shards.
void check_targets2d(const OpCall& call) {
  const auto &self = call.operands[0].meta, &target = call.operands[1].meta;
  auto items = self.sizes;
  if (items.size() > 1) {
    items.erase(items.begin() + 1);
  }
  const int64_t weight = call.operand_of_arg(kWeight);
  TESSERA_CHECK(ValueError,
                self.sizes.size() == 4 && target.sizes == items &&
                    (weight < 0 || call.operands[static_cast<size_t>(weight)].meta.sizes == DimVector{self.sizes[1]}),
                "aten::nll_loss2d: input {} and target {}; [N, C, H, W], [N, H, W] and a weight of [C], if any, are "
                "needed",
                to_string(self), to_string(target));
}

std::vector<TensorMeta> nll_loss2d_metas(const OpCall& call) {
  check_targets2d(call);
  const auto dtype = call.operands[0].meta.dtype;
  const bool per_item = call.args[kReduction].toInt() == at::Reduction::None;
  return {TensorMeta::contiguous(per_item ? call.operands[1].meta.sizes : DimVector(), dtype),
          TensorMeta::contiguous({}, dtype)};
}

/// Shards the batch or another dim of items.
AxisStrategy shard_item_dim(const OpCall& call, int64_t dim, int64_t in_target) {
  const int64_t reduction = nll_reduction(call);
  AxisStrategy strategy{.operands = PlacementVector(call.operands.size(), Replicate()),
                        .outputs = {Shard(in_target), Replicate()}};
  strategy.operands[0] = Shard(dim);
  if (reduction != at::Reduction::Mean) {
    strategy.operands[1] = Shard(in_target);
  }
  if (reduction == at::Reduction::Sum) {
    strategy.outputs = {Partial(), Partial()};
  } else if (reduction == at::Reduction::Mean) {
    strategy.outputs = {Partial(), Replicate()};
  }
  return strategy;
}

/// Shards classes. The total weight is that of the targets among a rank's classes, except for a mean, where it is
/// global; for several items without a reduction there is none.
AxisStrategy shard_classes(const OpCall& call, int64_t dim) {
  AxisStrategy strategy{.operands = PlacementVector(call.operands.size(), Replicate()),
                        .outputs = {Partial(), Replicate()}};
  strategy.operands[0] = Shard(dim);
  if (nll_reduction(call) == at::Reduction::Sum) {
    strategy.outputs[1] = Partial();
  }
  return strategy;
}

/// Kernels check this too, but not on ranks without samples.
void check_dtypes(const OpCall& call) {
  const auto& self = call.operands[0].meta;
  const int64_t weight = call.operand_of_arg(kWeight);
  const auto weight_dtype = weight < 0 ? self.dtype : call.operands[static_cast<size_t>(weight)].meta.dtype;
  TESSERA_CHECK(ValueError, c10::isFloatingType(self.dtype) && weight_dtype == self.dtype,
                "{}: input {} and weight of {}; they need one floating dtype", toString(call.op.operator_name()),
                to_string(self), c10::toString(weight_dtype));
  const auto& target = call.operands[1].meta;
  const bool takes_bytes = call.op.schema().name() == "aten::nll_loss_forward";  // unlike that of images
  TESSERA_CHECK(ValueError, target.dtype == at::kLong || (takes_bytes && target.dtype == at::kByte),
                "{}: target {}; classes are Long{}", toString(call.op.operator_name()), to_string(target),
                takes_bytes ? " or Byte" : "");
}

Strategies nll_loss_strategies(const OpCall& call) {
  check_dtypes(call);
  Strategies strategies;
  const int64_t ndim = call.operands[0].ndim();
  for (int64_t dim = 0; dim < ndim; ++dim) {
    const int64_t in_target = target_dim(dim, ndim);
    if (in_target != kNone) {
      strategies.push_back(shard_item_dim(call, dim, in_target));
    }
  }
  strategies.push_back(shard_classes(call, class_dim(ndim)));
  return strategies;
}

/// Returns the weight that the mean divides by, from the full target.
at::Tensor total_weight(const at::Tensor& target, const at::Tensor& weight, int64_t ignore_index,
                        at::ScalarType dtype) {
  const auto counted = target.ne(ignore_index);
  if (!weight.defined()) {
    return counted.sum().to(dtype);
  }
  const auto ignored = counted.logical_not().flatten();
  const auto classes = target.flatten().masked_fill(ignored, 0);
  return weight.index_select(0, classes).masked_fill_(ignored, 0).sum();
}

/// Checks a replicated target. Kernels see only this rank's part of it, and on a GPU an invalid target ends the
/// program's work on it.
void check_targets(const at::Tensor& target, int64_t ignore_index, int64_t num_classes) {
  if (!target.is_cpu() || target.numel() == 0) {
    return;
  }
  const auto [low, high] = target.masked_fill(target.eq(ignore_index), 0).aminmax();
  const auto least = low.item<int64_t>(), largest = high.item<int64_t>();
  TESSERA_CHECK(ValueError, least >= 0 && largest < num_classes,
                "aten::nll_loss: target {} is out of bounds; there are {} classes, and ignore_index is {}",
                least < 0 ? least : largest, num_classes, ignore_index);
}

/// Returns this rank's part of a replicated target.
at::Tensor own_target(at::Tensor target, const SpecPtr& self) {
  for (int64_t dim = 0; dim < self->ndim(); ++dim) {
    const int64_t in_target = target_dim(dim, self->ndim());
    if (in_target != kNone) {
      const auto range = local_range(self, dim);
      target = target.narrow(in_target, range.offset, range.length);
    }
  }
  return target.contiguous();
}

/// With sharded classes of self, converts target, weight and ignore_index (arguments `first_arg` and following, except
/// the reduction) to this rank's classes. Targets that are not classes at all stay invalid, so that the kernel rejects
/// them on every rank.
void take_own_classes(const c10::OperatorHandle& op, torch::jit::Stack* stack, const SpecPtr& self, size_t first_arg) {
  const int64_t classes_of_all = num_classes(self);
  const auto range = local_range(self, class_dim(self->ndim()));
  if (range.length == classes_of_all) {
    return;
  }
  auto& target = local_argument(op, stack, first_arg);
  auto& weight = local_argument(op, stack, first_arg + 1);
  auto& ignore_index = local_argument(op, stack, first_arg + 3);
  const auto classes = target.toTensor().to(at::kLong);
  const auto ignored = classes.eq(ignore_index.toInt());
  const auto invalid = classes.lt(0).logical_or_(classes.ge(classes_of_all)).logical_and_(ignored.logical_not());
  const auto elsewhere = classes.lt(range.offset).logical_or_(classes.ge(range.offset + range.length));
  target = classes.sub(range.offset)
               .masked_fill_(elsewhere.logical_or_(ignored), kElsewhere)
               .masked_fill_(invalid, std::max<int64_t>(range.length, 1));
  ignore_index = c10::IValue(kElsewhere);
  if (weight.isTensor() && weight.toTensor().defined()) {
    weight = weight.toTensor().narrow(0, range.offset, range.length).contiguous();
  }
}

/// Adds one class, which no target has, on a rank without classes, for the kernel.
void ensure_a_class(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t self_arg, size_t weight_arg) {
  auto& self = local_argument(op, stack, self_arg);
  const auto tensor = self.toTensor();
  const int64_t dim = class_dim(tensor.dim());
  if (tensor.size(dim) > 0) {
    return;
  }
  auto sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(dim)] = 1;
  self = at::zeros(sizes, tensor.options());
  if (auto& weight = local_argument(op, stack, weight_arg); weight.isTensor() && weight.toTensor().defined()) {
    weight = at::zeros({1}, weight.toTensor().options());
  }
}

/// Runs the loss. The sum of a mean may exceed 16 bits where the mean does not, and so may the total weight.
void local_nll_loss(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const bool mean =
      local_argument(op, stack, kReduction).toInt() == at::Reduction::Mean && plan.outputs[0]->has_partial();
  if (mean) {
    widen(local_argument(op, stack, 0));
    widen(local_argument(op, stack, kWeight));
  }
  const auto self = local_argument(op, stack, 0).toTensor();
  auto& target = local_argument(op, stack, 1);
  at::Tensor total;
  if (mean) {
    if (target.toTensor().scalar_type() == at::kByte) {
      target = target.toTensor().to(at::kLong);  // bytes cannot be compared with the ignore_index
    }
    const auto& weight = local_argument(op, stack, kWeight);
    const int64_t ignore_index = local_argument(op, stack, kIgnoreIndex).toInt();
    check_targets(target.toTensor(), ignore_index, num_classes(plan.operands[0]));
    total = total_weight(target.toTensor(), weight.isTensor() ? weight.toTensor() : at::Tensor(), ignore_index,
                         self.scalar_type());
    target = own_target(target.toTensor(), plan.operands[0]);
    local_argument(op, stack, kReduction) = c10::IValue(int64_t{at::Reduction::Sum});
  }
  take_own_classes(op, stack, plan.operands[0], 1);
  ensure_a_class(op, stack, 0, kWeight);
  const int64_t reduction = local_argument(op, stack, kReduction).toInt();
  if (local_argument(op, stack, 0).toTensor().numel() == 0) {
    // A mean that is not Partial has no terms: all ranks have no sample.
    const bool of_nothing = reduction == at::Reduction::Mean;
    set_results(op, stack,
                {at::full(plan.outputs[0]->local_sizes(), of_nothing ? NAN : 0, self.options()),
                 at::zeros({}, self.options())});
  } else {
    op.callBoxed(stack);
    if (reduction == at::Reduction::None && self.dim() == 4 && self.is_cuda()) {
      stack->back() = at::zeros({}, self.options());  // CUDA's kernel for images does not write it
    }
  }
  if (mean) {
    const auto sum = (*stack)[stack->size() - 2].toTensor();
    (*stack)[stack->size() - 2] = sum.div(total).to(plan.outputs[0]->dtype());
    stack->back() = total.to(plan.outputs[1]->dtype());
  }
}

/// (grad, self, target, weight, reduction, ignore_index, total_weight): the global total is an argument, and only a
/// mean uses it.
Strategies nll_loss_backward_strategies(const OpCall& call) {
  Strategies strategies;
  const bool per_item = call.operands[0].ndim() > 0;
  const int64_t ndim = call.operands[1].ndim();
  const auto add = [&](DimVector operands, int64_t dim) {
    strategies.push_back(sharded(call, operands, {dim}));
    const auto total = pending(call, call.operands.size() - 1);
    if (total && call.args[4].toInt() != at::Reduction::Mean) {
      strategies.back().operands.back() = *total;
    }
  };
  for (int64_t dim = 0; dim < ndim; ++dim) {
    DimVector operands(call.operands.size(), kNone);
    const int64_t in_target = target_dim(dim, ndim);
    operands[0] = per_item ? in_target : kNone;
    operands[1] = dim;
    operands[2] = in_target;
    add(operands, dim);
  }
  keep_linear(strategies, call, 0);
  return strategies;
}

void local_nll_loss_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto self = local_argument(op, stack, 1).toTensor();
  if (self.numel() == 0) {
    set_results(op, stack, {at::zeros(self.sizes(), self.options())});
  } else {
    take_own_classes(op, stack, plan.operands[1], 2);
    op.callBoxed(stack);
  }
}

const RegisterOpRules nll_loss_rules([] {
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
