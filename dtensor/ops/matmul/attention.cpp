// Scaled dot-product attention as the CPU's fused kernel computes it: batch items and heads are independent.

#include <ATen/OpMathType.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/ones.h>

#include "base/error.h"
#include "dtensor/dispatch/local_arguments.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

/// Returns the meta of [batch, heads, length, ...] as the kernel allocates it, with heads inside length.
TensorMeta heads_inside_length(at::IntArrayRef sizes, at::ScalarType dtype) {
  DimVector allocated(sizes.begin(), sizes.end());
  std::swap(allocated[1], allocated[2]);
  auto meta = TensorMeta::contiguous(allocated, dtype);
  std::swap(meta.sizes[1], meta.sizes[2]);
  std::swap(meta.strides[1], meta.strides[2]);
  return meta;
}

/// Shards batch and heads, if every operand has them in full; a mask may lack them or have size 1.
Strategies item_strategies(const OpCall& call, size_t mask_arg) {
  Strategies strategies;
  const auto& query = call.operands[0].meta;
  for (int64_t dim = 0; dim < 2; ++dim) {
    DimVector operands;
    bool fits = true;
    for (const auto& operand : call.operands) {
      const bool is_mask = operand.arg == mask_arg;  // which broadcasts to four dims
      operands.push_back(
          broadcast_dim(operand.meta, is_mask ? 4 : operand.ndim(), dim, query.sizes[static_cast<size_t>(dim)]));
      fits = fits && (is_mask || operands.back() != kNone);
    }
    if (fits) {
      strategies.push_back(sharded(call, operands, DimVector(call.outputs.size(), dim)));
    }
  }
  return strategies;
}

// (query, key, value, dropout_p, is_causal, attn_mask, scale) → output, logsumexp

Strategies attention_strategies(const OpCall& call) {
  TESSERA_CHECK(
      NotImplementedError, call.args[3].toDouble() == 0,
      "scaled_dot_product_attention: dropout_p {} on DTensors: shards would draw random numbers of their own; "
      "use dropout_p 0",
      call.args[3].toDouble());
  return item_strategies(call, 5);
}

/// Returns true for newer libtorch, whose kernel gives the output the query's layout; older ones put heads inside
/// length.
bool output_has_query_layout() {
  static const bool answer = [] {
    const auto items = at::ones({1, 2, 2, 1});
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(items, items, items)).is_contiguous();
  }();
  return answer;
}

std::vector<TensorMeta> attention_metas(const OpCall& call) {
  const auto& query = call.operands[0].meta;
  auto sizes = query.sizes;
  sizes.back() = call.operands[2].meta.sizes.back();
  auto output = heads_inside_length(sizes, query.dtype);
  if (output_has_query_layout()) {
    output.strides = local_strides(sizes, query.strides);
  }
  const auto wide = at::toOpMathType(query.dtype);
  return {std::move(output), heads_inside_length(at::IntArrayRef(sizes).slice(0, 3), wide)};
}

// (grad, query, key, value, output, logsumexp, dropout_p, is_causal, attn_mask, scale) → gradients of the three

Strategies attention_backward_strategies(const OpCall& call) {
  auto strategies = item_strategies(call, 8);
  keep_linear(strategies, call, 0);
  return strategies;
}

std::vector<TensorMeta> attention_backward_metas(const OpCall& call) {
  std::vector<TensorMeta> metas;
  for (const size_t operand : {1, 2, 3}) {
    metas.push_back(heads_inside_length(call.operands[operand].meta.sizes, call.operands[operand].meta.dtype));
  }
  return metas;
}

/// Skips the kernels without items, by whose number they divide.
void local_flash_attention(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  if (local_argument(op, stack, 0).toTensor().numel() > 0) {
    op.callBoxed(stack);
  } else {
    set_zero_results(op, stack, plan, c10::SmallVector<bool, 3>(plan.outputs.size(), true));
  }
}

const RegisterOpRules attention_rules([] {
  register_op_rule(
      {"aten::_scaled_dot_product_flash_attention_for_cpu"},
      {.strategies = attention_strategies, .local_call = local_flash_attention, .output_metas = attention_metas});
  register_op_rule({"aten::_scaled_dot_product_flash_attention_for_cpu_backward"},
                   {.strategies = attention_backward_strategies,
                    .local_call = local_flash_attention,
                    .output_metas = attention_backward_metas});
});

}  // namespace

}  // namespace tessera
