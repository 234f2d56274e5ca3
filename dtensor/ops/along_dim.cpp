// Ops that treat each row along one dim by itself: cumulative sums, sorting. Every other dim may be sharded; the dim
// itself may not.

#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

Strategies along_dim_strategies(const OpCall& call) {
  const auto& schema = call.op.schema().arguments();
  for (size_t i = 0; i < schema.size(); ++i) {
    if (schema[i].name() == "dim" && call.args[i].isInt()) {
      return along_dims(call, {wrap_dim(call.args[i].toInt(), call.operands[0].ndim())});
    }
  }
  return {};
}

/// _fft_c2c(self, dim, ...) and its kin, of real and complex tensors.
Strategies fft_strategies(const OpCall& call) {
  DimVector touched;
  for (const int64_t dim : call.args[1].toIntList()) {
    touched.push_back(wrap_dim(dim, call.operands[0].ndim()));
  }
  return along_dims(call, touched);
}

Strategies cumulative_sum_strategies(const OpCall& call) {
  auto strategies = along_dim_strategies(call);
  keep_linear(strategies, call, 0);
  return strategies;
}

/// Like operand 0, in the dtype that the last argument names, if it does.
std::vector<TensorMeta> like_self_as_dtype(const OpCall& call) {
  auto meta = like_operand(0)(call)[0];
  const bool named = call.op.schema().arguments().back().name() == "dtype" && call.args.back().isInt();
  meta.dtype = named ? call.args.back().toScalarType() : meta.dtype;
  return {meta};
}

std::vector<TensorMeta> values_and_indices(const OpCall& call) {
  auto metas = like_operand(0, 2)(call);
  metas[1].dtype = at::kLong;
  return metas;
}

/// glu and glu_backward halve their dim, so its size differs between the tensors; the others are alike.
const RegisterOpRules rules([] {
  register_op_rule({"aten::cumprod", "aten::cumprod_", "aten::sort", "aten::sort.stable", "aten::topk", "aten::glu"},
                   {.strategies = along_dim_strategies});
  register_op_rule({"aten::_safe_softmax", "aten::logcumsumexp"},
                   {.strategies = along_dim_strategies, .output_metas = like_self_as_dtype});
  register_op_rule({"aten::cummax", "aten::cummin"},
                   {.strategies = along_dim_strategies, .output_metas = values_and_indices});
  register_op_rule({"aten::cumsum", "aten::cumsum_"}, {.strategies = cumulative_sum_strategies});
  register_op_rule({"aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r"}, {.strategies = fft_strategies});
  register_op_rule({"aten::glu_backward"}, {.strategies = along_dim_strategies, .output_metas = like_operand(1)});
});

}  // namespace

}  // namespace tessera
