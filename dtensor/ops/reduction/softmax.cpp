// Softmax and its logarithm. Rows are independent. A row that is sharded over ranks needs its maximum and its sum over
// all of them, one number per row each; the row itself is not moved. Vocabulary-parallel cross-entropy uses this (M.
// Shoeybi et al.: Megatron-LM, 2019).

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/full.h>

#include <limits>

#include "base/error.h"
#include "comm/collectives.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

// Arguments: (self, dim, half_to_float) and (grad_output, output, dim, input_dtype).
constexpr size_t kForwardDim = 1;
constexpr size_t kBackwardDim = 2;

/// Prefers unsharded rows: of two strategies that move equally much, that is cheaper.
template <size_t dim_arg>
Strategies softmax_strategies(const OpCall& call) {
  const auto& meta = call.operands[0].meta;
  TESSERA_CHECK(ValueError, c10::isFloatingType(meta.dtype), "{}: of {}; pass a tensor of a floating dtype",
                toString(call.op.operator_name()), to_string(meta));
  const int64_t dim = wrap_dim(call.args[dim_arg].toInt(), call.operands[0].ndim());
  auto strategies = along_dims(call, {dim});
  if (call.operands[0].ndim() > 0) {
    strategies.push_back(sharded(call, DimVector(call.operands.size(), dim), {dim}));
  }
  return strategies;
}

bool shards_rows(const SpecPtr& spec, int64_t dim) {
  const auto& placements = spec->placements();
  return std::any_of(placements.begin(), placements.end(), [&](const Placement& p) { return p.is_shard(dim); });
}

/// Reduces one number per row over all ranks that share the row.
at::Tensor over_rows(const at::Tensor& numbers, ReduceOp op, const SpecPtr& spec, int64_t dim) {
  const auto result = numbers.contiguous();
  for (size_t axis = 0; axis < spec->placements().size(); ++axis) {
    if (spec->placements()[axis].is_shard(dim)) {
      all_reduce(result, op, spec->mesh().group(static_cast<int64_t>(axis)));
    }
  }
  return result;
}

at::Tensor largest(const at::Tensor& rows, int64_t dim) {
  if (rows.size(dim) > 0) {
    return at::amax(rows, dim, /*keepdim=*/true);
  }
  auto sizes = rows.sizes().vec();
  sizes[static_cast<size_t>(dim)] = 1;
  return at::full(sizes, -std::numeric_limits<double>::infinity(), rows.options());
}

enum class Result { Softmax, LogSoftmax };

template <Result kind>
void local_softmax(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto& spec = plan.operands[0];
  const int64_t dim = wrap_dim(local_argument(op, stack, kForwardDim).toInt(), spec->ndim());
  if (!shards_rows(spec, dim)) {
    op.callBoxed(stack);
    return;
  }
  const auto rows = widened(local_argument(op, stack, 0).toTensor());
  const auto shifted = rows - over_rows(largest(rows, dim), ReduceOp::Max, spec, dim);
  const auto powers = shifted.exp();
  const auto total = over_rows(powers.sum(dim, /*keepdim=*/true), ReduceOp::Sum, spec, dim);
  const auto result = kind == Result::Softmax ? powers.div(total) : shifted.sub(total.log());
  set_results(op, stack, {result.to(plan.outputs[0]->dtype())});
}

/// d softmax: y * (g - sum(g * y)); d log softmax, of which y is the exponential: g - exp(y) * sum(g).
template <Result kind>
void local_softmax_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto& spec = plan.operands[0];
  const int64_t dim = wrap_dim(local_argument(op, stack, kBackwardDim).toInt(), spec->ndim());
  if (!shards_rows(spec, dim)) {
    op.callBoxed(stack);
    return;
  }
  const auto grad = widened(local_argument(op, stack, 0).toTensor());
  const auto output = widened(local_argument(op, stack, 1).toTensor());
  const auto terms = kind == Result::Softmax ? grad.mul(output) : grad;
  const auto total = over_rows(terms.sum(dim, /*keepdim=*/true), ReduceOp::Sum, spec, dim);
  const auto result = kind == Result::Softmax ? output.mul(grad.sub(total)) : grad.sub(output.exp().mul(total));
  set_results(op, stack, {result.to(plan.outputs[0]->dtype())});
}

// A rank without elements of a row still takes part in the row's reductions.
const RegisterOpRules softmax_rules([] {
  register_op_rule({"aten::_softmax"}, {.strategies = softmax_strategies<kForwardDim>,
                                        .local_call = local_softmax<Result::Softmax>,
                                        .runs_on_empty_shards = true});
  register_op_rule({"aten::_log_softmax"}, {.strategies = softmax_strategies<kForwardDim>,
                                            .local_call = local_softmax<Result::LogSoftmax>,
                                            .runs_on_empty_shards = true});
  register_op_rule({"aten::_softmax_backward_data"}, {.strategies = softmax_strategies<kBackwardDim>,
                                                      .local_call = local_softmax_backward<Result::Softmax>,
                                                      .runs_on_empty_shards = true});
  register_op_rule({"aten::_log_softmax_backward_data"}, {.strategies = softmax_strategies<kBackwardDim>,
                                                          .local_call = local_softmax_backward<Result::LogSoftmax>,
                                                          .runs_on_empty_shards = true});
});

}  // namespace

}  // namespace tessera
