#include "dtensor/ops/pointwise/pointwise.h"

#include <ATen/ops/add.h>
#include <ATen/ops/conj_physical.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/neg.h>

#include "dtensor/dispatch/local_arguments.h"
#include "dtensor/ops/rule_helpers.h"
#include "dtensor/propagation/fill_check.h"
#include "dtensor/propagation/op_names.h"
#include "dtensor/propagation/output_metas.h"

namespace tessera {

namespace {

/// self.add_(other) with a Partial sum self, which cannot move: one rank adds a replicated other.
Strategies add_in_place_strategies(const OpCall& call) {
  auto strategies = linear_strategies(call, {{0, 1}});
  keep_linear(strategies, call, 0);
  return strategies;
}

/// Checks only alpha on the kernel, because planning has checked the dtypes.
void local_add_in_place(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto& self = plan.operands[0];
  const SpecPtr other = plan.operands.size() > 1 ? plan.operands[1] : nullptr;
  for (size_t axis = 0; axis < self->placements().size(); ++axis) {
    const bool replicated = !other || other->placements()[axis].is_replicate();
    if (self->placements()[axis] == Partial() && replicated && self->mesh().coordinate()[axis] != 0) {
      if (!is_surely_taken(local_argument(op, stack, 2).toScalar(), self->dtype())) {
        dry_run_on_size_two(op, *stack);
      }
      set_results(op, stack, {local_argument(op, stack, 0)});
      return;
    }
  }
  op.callBoxed(stack);
}

void register_linear(const std::vector<std::string>& ops, std::vector<std::vector<size_t>> linear_operands) {
  const auto strategies = [linear_operands](const OpCall& call) { return linear_strategies(call, linear_operands); };
  register_op_rule(
      ops,
      {.strategies = strategies, .output_metas = pointwise_metas, .reads_float_scalars = false, .needs_dry_run = true});
}

Strategies divided_by_number_strategies(const OpCall& call) {
  return divides_by_zero(call.args[1]) ? pointwise_strategies(call) : linear_strategies(call, {{0}});
}

/// For ops like ones_like, which ignore their operand's values, so that those of a Partial tensor need not be reduced.
Strategies constant_like_strategies(const OpCall& call) {
  auto strategies = pointwise_strategies(call);
  if (const auto placement = pending(call, 0)) {
    strategies.push_back({.operands = {*placement}, .outputs = {Replicate()}});
  }
  return strategies;
}

/// Zeros are the terms of a zero sum, but not every reduction exists for another dtype.
Strategies zeros_like_strategies(const OpCall& call) {
  if (call.outputs.at(0).dtype != call.operands[0].meta.dtype) {
    return constant_like_strategies(call);
  }
  auto strategies = pointwise_strategies(call);
  keep_partial(strategies, call);
  return strategies;
}

/// conj() and similar views are negated or conjugated when read. A DTensor has no bit for that, which view_as_real()
/// and resolve_conj() would need, so the view is a copy.
template <at::Tensor (*op)(const at::Tensor&)>
void local_now(const c10::OperatorHandle& view, torch::jit::Stack* stack, const OpPlan& /*plan*/) {
  set_results(view, stack, {op(local_argument(view, stack, 0).toTensor())});
}

/// Filling with zeros is linear.
Strategies masked_fill_strategies(const OpCall& call) {
  auto strategies = pointwise_strategies(call);
  if (call.args[2].isScalar() && call.args[2].toScalar().equal(0)) {
    keep_linear(strategies, call, 0);
  }
  return strategies;
}

/// fill_ discards a pending reduction: for a Partial sum, the first rank holds the value, and the others zeros.
Strategies fill_in_place_strategies(const OpCall& call) {
  auto strategies = pointwise_strategies(call);
  const auto placement = pending(call, 0);
  if (placement && !placement->is_norm_partial() && !placement->is_partial(ReduceOp::Product)) {
    AxisStrategy strategy{.operands = PlacementVector(call.operands.size(), Replicate()), .outputs = {*placement}};
    strategy.operands[0] = *placement;
    strategies.push_back(std::move(strategy));
  }
  return strategies;
}

void check_fill_value(const at::Tensor& part, int64_t numel, const c10::IValue& value) {
  if (value.isTensor()) {
    check_fill(part, numel, value.toTensor());
  } else {
    check_fill(part, numel, value.toScalar());
  }
}

void local_fill_in_place(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto local = local_argument(op, stack, 0).toTensor();
  const auto& self = plan.operands[0];
  const int64_t numel = c10::multiply_integers(self->sizes());
  bool first = true;
  for (size_t axis = 0; axis < self->placements().size(); ++axis) {
    first = first && (self->placements()[axis] != Partial() || self->mesh().coordinate()[axis] == 0);
  }
  check_fill_value(first ? local : at::empty({0}, local.options()), numel, local_argument(op, stack, 1));
  if (first) {
    op.callBoxed(stack);
  } else {
    set_results(op, stack, {local.zero_()});
  }
}

/// Fills a new tensor, whose dtype may differ from the operand's.
void local_filled(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto value = local_argument(op, stack, 1);
  op.callBoxed(stack);
  check_fill_value(stack->back().toTensor(), c10::multiply_integers(plan.outputs[0]->sizes()), value);
}

constexpr const char* kPointwise = R"(
    _prelu_kernel abs abs_ acos acos_ acosh acosh_ add.Scalar addcdiv addcdiv_ addcmul addcmul_ asin asin_ asinh
    asinh_ atan atan2 atan2_ atan_ atanh atanh_ bitwise_and.Scalar bitwise_and.Tensor bitwise_and_.Scalar
    bitwise_and_.Tensor bitwise_not bitwise_not_ bitwise_or.Scalar bitwise_or.Tensor bitwise_or_.Scalar
    bitwise_or_.Tensor bitwise_xor.Scalar bitwise_xor.Tensor bitwise_xor_.Scalar bitwise_xor_.Tensor ceil ceil_ clamp
    clamp.Tensor clamp_ clamp_.Tensor clamp_max clamp_max.Tensor clamp_max_ clamp_max_.Tensor clamp_min
    clamp_min.Tensor clamp_min_ clamp_min_.Tensor copysign.Scalar copysign.Tensor copysign_.Scalar copysign_.Tensor
    cos cos_ cosh cosh_ deg2rad deg2rad_ digamma digamma_ div.Scalar_mode div.Tensor_mode div_.Scalar_mode
    div_.Tensor_mode elu elu_ eq.Scalar eq.Tensor eq_.Scalar eq_.Tensor erf erf_ erfc erfc_ erfinv erfinv_ exp exp2
    exp2_ exp_ expm1 expm1_ floor floor_ floor_divide floor_divide.Scalar floor_divide_.Scalar
    floor_divide_.Tensor fmax fmin fmod.Scalar fmod.Tensor fmod_.Scalar fmod_.Tensor frac frac_ ge.Scalar ge.Tensor
    ge_.Scalar ge_.Tensor gelu gelu_ gt.Scalar gt.Tensor gt_.Scalar gt_.Tensor hardsigmoid hardsigmoid_ hardswish
    hardswish_ hardtanh hardtanh_ heaviside hypot isinf isnan isneginf isposinf le.Scalar le.Tensor le_.Scalar
    le_.Tensor leaky_relu leaky_relu_ lerp.Scalar lerp.Tensor lerp_.Scalar lerp_.Tensor lgamma lgamma_ log log10
    log10_ log1p log1p_ log2 log2_ log_ logaddexp logaddexp2 logical_and logical_and_ logical_not logical_not_
    logical_or logical_or_ logical_xor logical_xor_ logit logit_ lt.Scalar lt.Tensor lt_.Scalar lt_.Tensor
    masked_fill.Tensor masked_fill_.Tensor maximum minimum mish mish_ nan_to_num nan_to_num_ ne.Scalar ne.Tensor
    ne_.Scalar ne_.Tensor pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow_.Scalar pow_.Tensor reciprocal
    reciprocal_ relu relu_ remainder.Scalar remainder.Scalar_Tensor remainder.Tensor remainder_.Scalar
    remainder_.Tensor round round.decimals round_ round_.decimals rsqrt rsqrt_ rsub.Scalar sgn sgn_ sigmoid sigmoid_
    sign sign_ signbit silu silu_ sin sin_ sinc sinc_ sinh sinh_ softplus sqrt sqrt_ sub.Scalar tan tan_ tanh tanh_
    threshold threshold_ trunc trunc_ where.self xlogy.Tensor xlogy_.Tensor)";

/// Linear in operand 0, the gradient: a Partial gradient stays Partial until an op needs the sum.
constexpr const char* kBackward = R"(
    gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward logit_backward
    mish_backward native_dropout_backward sigmoid_backward silu_backward softplus_backward tanh_backward
    threshold_backward)";

const RegisterOpRules pointwise_rules([] {
  const auto strategies = [](const OpCall& call) { return pointwise_strategies(call); };
  register_op_rule(
      aten_ops(kPointwise),
      {.strategies = strategies, .output_metas = pointwise_metas, .reads_float_scalars = false, .needs_dry_run = true});
  register_linear({"aten::neg", "aten::neg_", "aten::clone", "aten::alias", "aten::detach_", "aten::_to_copy",
                   "aten::lift_fresh", "aten::lift", "aten::lift_fresh_copy", "aten::alias_copy", "aten::detach_copy",
                   "aten::mul.Scalar", "aten::mul_.Scalar"},
                  {{0}});
  const auto linear_in_self = [](const OpCall& call) { return linear_strategies(call, {{0}}); };
  register_op_rule(
      {"aten::_conj"},
      {.strategies = linear_in_self, .local_call = local_now<at::conj_physical>, .views_are_copies = true});
  register_op_rule({"aten::_neg_view"},
                   {.strategies = linear_in_self, .local_call = local_now<at::neg>, .views_are_copies = true});
  register_op_rule(
      {"aten::div.Scalar", "aten::div_.Scalar"},
      {.strategies = divided_by_number_strategies, .output_metas = pointwise_metas, .reads_float_scalars = false});
  register_linear(aten_ops(kBackward), {{0}});
  register_linear({"aten::add.Tensor", "aten::sub.Tensor", "aten::rsub.Tensor", "aten::copy_", "aten::copy"}, {{0, 1}});
  register_op_rule({"aten::fill_.Scalar", "aten::fill_.Tensor"}, {.strategies = fill_in_place_strategies,
                                                                  .local_call = local_fill_in_place,
                                                                  .reads_float_scalars = false,
                                                                  .runs_on_empty_shards = true});
  register_op_rule({"aten::fill.Scalar", "aten::fill.Tensor"}, {.strategies = strategies,
                                                                .local_call = local_filled,
                                                                .output_metas = pointwise_metas,
                                                                .reads_float_scalars = false,
                                                                .runs_on_empty_shards = true});
  register_op_rule({"aten::masked_fill.Scalar", "aten::masked_fill_.Scalar"},
                   {.strategies = masked_fill_strategies, .output_metas = pointwise_metas, .needs_dry_run = true});
  register_op_rule({"aten::add_.Tensor", "aten::sub_.Tensor", "aten::add_.Scalar", "aten::sub_.Scalar"},
                   {.strategies = add_in_place_strategies,
                    .local_call = local_add_in_place,
                    .output_metas = pointwise_metas,
                    .reads_float_scalars = false,
                    .needs_dry_run = true});
  register_linear({"aten::mul.Tensor", "aten::mul_.Tensor"}, {{0}, {1}});
  register_linear({"aten::div.Tensor", "aten::div_.Tensor"}, {{0}});
  register_op_rule({"aten::zeros_like", "aten::zero_", "aten::zero"}, {.strategies = zeros_like_strategies});
  register_op_rule({"aten::empty_like", "aten::ones_like"}, {.strategies = constant_like_strategies});
  register_op_rule({"aten::full_like"}, {.strategies = constant_like_strategies,
                                         .local_call = local_filled,
                                         .reads_float_scalars = false,
                                         .runs_on_empty_shards = true});
});

}  // namespace

Strategies pointwise_strategies(const OpCall& call) {
  return pointwise_strategies(call, call.outputs.at(0));
}

std::vector<TensorMeta> pointwise_metas(const OpCall& call) {
  try {
    return infer_output_metas(call);
  } catch (const c10::NotImplementedError&) {
    // There is no kernel for meta tensors: sizes are simple, and one element shows the dtypes.
  }
  at::Tensor sum;  // with the layout of results
  for (const auto& operand : call.operands) {
    const auto term = at::empty_strided(operand.meta.sizes, operand.meta.strides, at::device(at::kMeta));
    sum = sum.defined() ? at::add(sum, term) : at::neg(term);
  }
  std::vector<TensorMeta> metas;
  for (const auto dtype : infer_output_dtypes(call)) {
    auto meta = TensorMeta::of(sum);
    meta.dtype = dtype;
    metas.push_back(std::move(meta));
  }
  return metas;
}

Strategies pointwise_strategies(const OpCall& call, const TensorMeta& elements) {
  Strategies strategies;
  for (int64_t dim = 0; dim < std::ssize(elements.sizes); ++dim) {
    DimVector operand_dims;
    for (const auto& operand : call.operands) {
      operand_dims.push_back(broadcast_dim(operand.meta, elements.sizes, dim));
    }
    strategies.push_back(sharded(call, operand_dims, DimVector(call.outputs.size(), dim)));
  }
  return strategies;
}

Strategies linear_strategies(const OpCall& call, const std::vector<std::vector<size_t>>& linear_operands) {
  auto strategies = pointwise_strategies(call);
  for (const auto& set : linear_operands) {
    const size_t taken = std::min(set.size(), call.operands.size());
    keep_linear(strategies, call, set[0], at::ArrayRef<size_t>(set).slice(1, taken - 1));
  }
  return strategies;
}

}  // namespace tessera
