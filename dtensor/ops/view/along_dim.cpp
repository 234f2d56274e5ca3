// Ops that treat each row along one dim separately, such as cumulative sums and sorting. All other dims may be sharded.

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

/// Returns the dims of _fft_c2c(self, dim, ...) and similar ops. There is at least one; without any, fft functions
/// copy.
DimVector fft_dims(const OpCall& call) {
  DimVector dims;
  for (const int64_t dim : call.args[1].toIntList()) {
    dims.push_back(wrap_dim(dim, call.operands[0].ndim()));
  }
  return dims;
}

Strategies fft_strategies(const OpCall& call) {
  return along_dims(call, fft_dims(call));
}

/// Returns metas with length `length` in the last of the dims, since half of a real signal's transform is redundant.
std::vector<TensorMeta> fft_metas(const OpCall& call, at::ScalarType dtype, int64_t length) {
  auto sizes = call.operands[0].meta.sizes;
  sizes[static_cast<size_t>(fft_dims(call).back())] = length;
  return {TensorMeta::contiguous(sizes, dtype)};
}

std::vector<TensorMeta> real_to_complex_metas(const OpCall& call) {
  const auto& self = call.operands[0].meta;
  const int64_t length = self.sizes[static_cast<size_t>(fft_dims(call).back())];
  const bool is_onesided = call.args[3].toBool();
  return fft_metas(call, c10::toComplexType(self.dtype), is_onesided ? length / 2 + 1 : length);
}

std::vector<TensorMeta> complex_to_real_metas(const OpCall& call) {
  return fft_metas(call, c10::toRealValueType(call.operands[0].meta.dtype), call.args[3].toInt());
}

Strategies cumulative_sum_strategies(const OpCall& call) {
  auto strategies = along_dim_strategies(call);
  keep_linear(strategies, call, 0);
  return strategies;
}

/// Returns metas like operand 0, in the dtype of the last argument, if given.
std::vector<TensorMeta> like_self_as_dtype(const OpCall& call) {
  auto meta = like_operand(0)(call)[0];
  const bool named = call.op.schema().arguments().back().name() == "dtype" && call.args.back().isInt();
  meta.dtype = named ? call.args.back().toScalarType() : meta.dtype;
  return {meta};
}

std::vector<TensorMeta> like_self_with_indices(const OpCall& call) {
  auto metas = like_operand(0, 2)(call);
  metas[1].dtype = at::kLong;
  return metas;
}

/// glu and glu_backward halve their dim, so its size differs between the tensors; others have equal sizes.
const RegisterOpRules along_dim_rules([] {
  register_op_rule({"aten::cumprod", "aten::cumprod_", "aten::sort", "aten::sort.stable", "aten::topk", "aten::glu"},
                   {.strategies = along_dim_strategies});
  register_op_rule({"aten::_safe_softmax", "aten::logcumsumexp"},
                   {.strategies = along_dim_strategies, .output_metas = like_self_as_dtype});
  register_op_rule({"aten::cummax", "aten::cummin"},
                   {.strategies = along_dim_strategies, .output_metas = like_self_with_indices});
  register_op_rule({"aten::cumsum", "aten::cumsum_"}, {.strategies = cumulative_sum_strategies});
  register_op_rule({"aten::_fft_c2c"}, {.strategies = fft_strategies, .output_metas = like_operand(0)});
  register_op_rule({"aten::_fft_r2c"}, {.strategies = fft_strategies, .output_metas = real_to_complex_metas});
  register_op_rule({"aten::_fft_c2r"}, {.strategies = fft_strategies, .output_metas = complex_to_real_metas});
  register_op_rule({"aten::glu_backward"}, {.strategies = along_dim_strategies, .output_metas = like_operand(1)});
});

}  // namespace

}  // namespace tessera
