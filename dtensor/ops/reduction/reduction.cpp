// Reductions whose result over a sharded dim is Partial: each rank reduces its shard.

#include <ATen/OpMathType.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/sum.h>

#include <limits>

#include "base/error.h"
#include "dtensor/ops/pointwise/pointwise.h"
#include "dtensor/ops/reduction/reduction.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

/// Dims that a call reduces, and whether they are kept with size 1.
struct Reduction {
  DimVector dims;
  bool keepdim = false;

  /// Returns the output's dim for operand dim `dim`; kNone if it is reduced.
  int64_t output_dim(int64_t dim) const {
    if (contains(dims, dim)) {
      return kNone;
    }
    return keepdim ? dim : dim - std::count_if(dims.begin(), dims.end(), [&](int64_t d) { return d < dim; });
  }
};

/// Parses arguments "dim" and "keepdim" by name, because their position differs between overloads. Without them, all
/// dims.
Reduction parse_reduction(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> args, int64_t ndim) {
  Reduction result;
  c10::IValue dims;
  const auto& schema = op.schema().arguments();
  for (size_t i = 0; i < schema.size(); ++i) {
    if (schema[i].name() == "dim") {
      dims = args[i];
    } else if (schema[i].name() == "keepdim") {
      result.keepdim = args[i].toBool();
    }
  }
  result.dims = dims_argument(dims, ndim);
  return result;
}

Reduction parse_reduction(const OpCall& call) {
  return parse_reduction(call.op, call.args, call.operands[0].ndim());
}

/// Shards dims that are kept. A reduced dim makes the outputs `reduced`, if given. An operand that is already Partial
/// is reduced at once instead of being sharded and becoming Partial again: clip_grad_norm_'s stacked norms cost one
/// all-reduce in total, although their total is read twice.
Strategies reduce_strategies(const OpCall& call, std::optional<Placement> reduced) {
  Strategies strategies;
  reduced = pending(call, 0) ? std::nullopt : reduced;
  const auto reduction = parse_reduction(call);
  for (int64_t dim = 0; dim < call.operands[0].ndim(); ++dim) {
    const int64_t to = reduction.output_dim(dim);
    if (to != kNone || reduced) {
      strategies.push_back(sharded(call, {dim}, DimVector(call.outputs.size(), to), reduced.value_or(Replicate())));
    }
  }
  return strategies;
}

template <ReduceOp op>
Strategies extremum_strategies(const OpCall& call) {
  // ATen rejects the extremum of an empty tensor: let it do so on every rank.
  const bool of_nothing = numel(call.operands[0].meta) == 0;
  return reduce_strategies(call, of_nothing ? std::nullopt : std::optional<Placement>(Partial(op)));
}

/// For ops where an empty list of dims means none, whereas for sum and similar ops it means all.
template <ReduceOp op>
Strategies any_dims_strategies(const OpCall& call) {
  const auto& dims = call.args[1];
  return dims.isIntList() && dims.toIntList().empty() ? pointwise_strategies(call) : extremum_strategies<op>(call);
}

Strategies kept_dims_strategies(const OpCall& call) {
  return reduce_strategies(call, std::nullopt);
}

Strategies product_strategies(const OpCall& call) {
  return reduce_strategies(call, Partial(ReduceOp::Product));
}

Strategies sum_strategies(const OpCall& call) {
  auto strategies = reduce_strategies(call, Partial());
  keep_linear(strategies, call, 0);
  return strategies;
}

/// Returns the neutral element for an empty shard, because kernels reject an empty dim.
template <ReduceOp reduce>
void local_extremum(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto local = local_argument(op, stack, 0).toTensor();
  const auto& out = plan.outputs[0];
  if (local.numel() == 0 && out->has_partial()) {
    const auto options = local.options().dtype(out->dtype());
    set_results(op, stack, {at::full(out->local_sizes(), reduction_identity(reduce, out->dtype()), options)});
    return;
  }
  op.callBoxed(stack);
}

/// mean = local sum / global count: shards differ in length, so an average of averages would be wrong.
void local_mean(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto first = stack->size() - op.schema().arguments().size();
  const auto reduction = parse_reduction(op, at::ArrayRef<c10::IValue>(*stack).slice(first), plan.operands[0]->ndim());
  bool cut = false;
  int64_t count = 1;
  for (const int64_t dim : reduction.dims) {
    for (const auto& placement : plan.operands[0]->placements()) {
      cut = cut || placement.is_shard(dim);
    }
    count *= plan.operands[0]->sizes()[static_cast<size_t>(dim)];
  }
  if (!cut) {
    op.callBoxed(stack);
    return;
  }
  const auto local = local_argument(op, stack, 0).toTensor();
  const auto dtype = plan.outputs[0]->dtype();
  const auto sum = at::sum(local, reduction.dims, reduction.keepdim, at::toOpMathType(dtype));
  set_results(op, stack, {sum.div_(count).to(dtype)});
}

Strategies norm_strategies(const OpCall& call) {
  const double p = call.args.size() > 1 && !call.args[1].isNone() ? call.args[1].toScalar().toDouble() : 2;
  const bool real = c10::isFloatingType(call.operands[0].meta.dtype);
  return reduce_strategies(call, real ? norm_placement(p) : std::nullopt);
}

/// Returns 0 for an empty shard with any p, because norms are never negative; the kernel rejects p = inf there.
void local_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto local = local_argument(op, stack, 0).toTensor();
  const auto& out = plan.outputs[0];
  if (local.numel() == 0 && out->has_partial()) {
    set_results(op, stack, {at::full(out->local_sizes(), 0, local.options().dtype(out->dtype()))});
    return;
  }
  op.callBoxed(stack);
}

/// Returns output metas of reductions without a meta kernel. `dtype` maps the operand's dtype to the output's.
template <class Dtype>
OutputMetas reduced_metas(Dtype dtype, size_t num_outputs = 1) {
  return [=](const OpCall& call) {
    DimVector sizes;
    const auto reduction = parse_reduction(call);
    const auto& in = call.operands[0].meta.sizes;
    for (size_t dim = 0; dim < in.size(); ++dim) {
      if (!contains(reduction.dims, static_cast<int64_t>(dim))) {
        sizes.push_back(in[dim]);
      } else if (reduction.keepdim) {
        sizes.push_back(1);
      }
    }
    return std::vector<TensorMeta>(num_outputs, TensorMeta::contiguous(sizes, dtype(call)));
  };
}

at::ScalarType same_dtype(const OpCall& call) {
  return call.operands[0].meta.dtype;
}

/// Sums of integers are int64 unless the last argument, dtype, says otherwise.
at::ScalarType sum_dtype(const OpCall& call) {
  const auto& dtype = call.args.back();
  if (dtype.isInt()) {
    return dtype.toScalarType();
  }
  const auto own = call.operands[0].meta.dtype;
  return c10::isIntegralType(own, /*includeBool=*/true) ? at::kLong : own;
}

/// Variances of complex numbers are real.
at::ScalarType real_dtype(const OpCall& call) {
  return c10::toRealValueType(call.operands[0].meta.dtype);
}

at::ScalarType floating_dtype(const OpCall& call) {
  const auto own = call.operands[0].meta.dtype;
  return c10::isIntegralType(own, /*includeBool=*/true) ? at::typeMetaToScalarType(at::get_default_dtype()) : own;
}

at::ScalarType long_dtype(const OpCall&) {
  return at::kLong;
}

std::vector<TensorMeta> variance_and_mean(const OpCall& call) {
  auto metas = reduced_metas(same_dtype, 2)(call);
  metas[0].dtype = real_dtype(call);
  return metas;
}

std::vector<TensorMeta> reduced_with_indices(const OpCall& call) {
  for (const int64_t dim : parse_reduction(call).dims) {
    TESSERA_CHECK(ValueError, call.operands[0].ndim() == 0 || call.operands[0].meta.sizes[static_cast<size_t>(dim)] > 0,
                  "{}: dim {} of {} has no elements", toString(call.op.operator_name()), dim,
                  to_string(call.operands[0].meta));
  }
  auto metas = reduced_metas(same_dtype, 2)(call);
  metas[1].dtype = at::kLong;
  return metas;
}

const RegisterOpRules reduction_rules([] {
  register_op_rule({"aten::sum", "aten::sum.dim_IntList"}, {.strategies = sum_strategies});
  register_op_rule({"aten::nansum"},
                   {.strategies = [](const OpCall& call) { return reduce_strategies(call, Partial()); },
                    .output_metas = reduced_metas(sum_dtype),
                    .needs_dry_run = true});
  register_op_rule({"aten::mean", "aten::mean.dim"}, {.strategies = sum_strategies, .local_call = local_mean});
  register_op_rule({"aten::prod"}, {.strategies = product_strategies, .output_metas = reduced_metas(sum_dtype)});
  register_op_rule({"aten::prod.dim_int"}, {.strategies = product_strategies});
  register_op_rule({"aten::count_nonzero", "aten::count_nonzero.dim_IntList"},
                   {.strategies = [](const OpCall& call) { return reduce_strategies(call, Partial()); },
                    .output_metas = reduced_metas(long_dtype)});
  const OpRule max{.strategies = extremum_strategies<ReduceOp::Max>,
                   .local_call = local_extremum<ReduceOp::Max>,
                   .needs_dry_run = true};
  const OpRule min{.strategies = extremum_strategies<ReduceOp::Min>,
                   .local_call = local_extremum<ReduceOp::Min>,
                   .needs_dry_run = true};
  register_op_rule({"aten::amax", "aten::any", "aten::any.dim", "aten::_is_any_true"}, max);
  register_op_rule({"aten::amin", "aten::all", "aten::all.dim", "aten::_is_all_true"}, min);
  auto any = max;
  any.strategies = any_dims_strategies<ReduceOp::Max>;
  register_op_rule({"aten::any.dims"}, any);
  auto all = min;
  all.strategies = any_dims_strategies<ReduceOp::Min>;
  register_op_rule({"aten::all.dims"}, all);
  auto max_of_all = max;
  max_of_all.output_metas = reduced_metas(same_dtype);
  register_op_rule({"aten::max"}, max_of_all);
  auto min_of_all = min;
  min_of_all.output_metas = reduced_metas(same_dtype);
  register_op_rule({"aten::min"}, min_of_all);
  register_op_rule({"aten::norm.Scalar", "aten::norm.ScalarOpt_dim", "aten::norm.ScalarOpt_dim_dtype",
                    "aten::norm.ScalarOpt_dtype", "aten::linalg_vector_norm"},
                   {.strategies = norm_strategies, .local_call = local_norm});
  register_op_rule(
      {"aten::var.correction", "aten::std.correction"},
      {.strategies = kept_dims_strategies, .output_metas = reduced_metas(real_dtype), .needs_dry_run = true});
  register_op_rule({"aten::var_mean.correction", "aten::std_mean.correction"},
                   {.strategies = kept_dims_strategies, .output_metas = variance_and_mean, .needs_dry_run = true});
  register_op_rule({"aten::max.dim", "aten::min.dim", "aten::argmax", "aten::argmin", "aten::aminmax"},
                   {.strategies = kept_dims_strategies, .needs_dry_run = true});
  register_op_rule(
      {"aten::logsumexp"},
      {.strategies = kept_dims_strategies, .output_metas = reduced_metas(floating_dtype), .needs_dry_run = true});
  register_op_rule({"aten::median.dim", "aten::nanmedian.dim", "aten::mode"},
                   {.strategies = kept_dims_strategies, .output_metas = reduced_with_indices});
});

}  // namespace

c10::Scalar reduction_identity(ReduceOp op, at::ScalarType dtype) {
  const bool max = op == ReduceOp::Max;
  if (c10::isFloatingType(dtype)) {
    return max ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
  }
  switch (dtype) {
    case at::kBool:
      return !max;
    case at::kByte:
      return max ? 0 : 255;
    case at::kChar:
      return max ? -128 : 127;
    case at::kShort:
      return static_cast<int64_t>(max ? std::numeric_limits<int16_t>::min() : std::numeric_limits<int16_t>::max());
    case at::kInt:
      return static_cast<int64_t>(max ? std::numeric_limits<int32_t>::min() : std::numeric_limits<int32_t>::max());
    default:
      return max ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
  }
}

}  // namespace tessera
