// Normalizations: items are independent of each other, so dims that are not normalized may be sharded. The gradients of
// weight and bias are then Partial sums over the items.

#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"
#include "dtensor/ops/rule_helpers.h"
#include "dtensor/propagation/output_metas.h"

namespace tessera {

namespace {

/// Returns the dtype of saved means: float32 for low-precision inputs if the weight (or without one the bias, the next
/// argument) is float32.
at::ScalarType statistics_dtype(const OpCall& call, size_t weight_arg) {
  const auto dtype = call.operands[0].meta.dtype;
  if (!at::isReducedFloatingType(dtype)) {
    return dtype;
  }
  const int64_t weight = call.operand_of_arg(weight_arg), bias = call.operand_of_arg(weight_arg + 1);
  const int64_t scale = weight >= 0 ? weight : bias;
  const bool mixed = scale >= 0 && call.operands[static_cast<size_t>(scale)].meta.dtype == at::kFloat;
  return mixed ? at::kFloat : dtype;
}

/// CUDA's layer norm always computes them in float32, unlike its group norm.
at::ScalarType layer_statistics_dtype(const OpCall& call, size_t weight_arg) {
  const auto dtype = call.operands[0].meta.dtype;
  const bool on_gpu = call.operands[0].spec->mesh().device_type() == at::kCUDA;
  return on_gpu && at::isReducedFloatingType(dtype) ? at::kFloat : statistics_dtype(call, weight_arg);
}

/// Shards operands with one entry per item along dim `dim`, but not weight and bias.
AxisStrategy shard_items(const OpCall& call, std::initializer_list<size_t> item_args, int64_t dim) {
  AxisStrategy strategy{.operands = PlacementVector(call.operands.size(), Replicate()),
                        .outputs = PlacementVector(call.outputs.size(), Shard(dim))};
  for (size_t i = 0; i < call.operands.size(); ++i) {
    for (const size_t arg : item_args) {
      if (call.operands[i].arg == arg) {
        strategy.operands[i] = Shard(dim);
      }
    }
  }
  return strategy;
}

/// For backward passes: output 0 is the input's gradient if requested; the others are sums over the items.
AxisStrategy shard_items_backward(const OpCall& call, std::initializer_list<size_t> item_args, int64_t dim,
                                  bool has_input_grad) {
  auto strategy = shard_items(call, item_args, dim);
  for (size_t i = has_input_grad ? 1 : 0; i < strategy.outputs.size(); ++i) {
    strategy.outputs[i] = Partial();
  }
  return strategy;
}

// native_layer_norm(input, normalized_shape, weight, bias, eps) → output, mean, rstd

int64_t count_item_dims(const OpCall& call, size_t input, size_t shape_arg) {
  return call.operands[input].ndim() - std::ssize(call.args[shape_arg].toIntList());
}

Strategies layer_norm_strategies(const OpCall& call) {
  Strategies strategies;
  for (int64_t dim = 0; dim < count_item_dims(call, 0, 1); ++dim) {
    strategies.push_back(shard_items(call, {0}, dim));
  }
  return strategies;
}

/// Kernels check this too, but not on ranks without items.
void check_normalized_shape(const OpCall& call) {
  const auto& input = call.operands[0].meta;
  const auto list = call.args[1].toIntVector();
  const DimVector shape(list.begin(), list.end());
  const bool is_last = !shape.empty() && shape.size() <= input.sizes.size() &&
                       std::equal(shape.rbegin(), shape.rend(), input.sizes.rbegin());
  TESSERA_CHECK(ValueError, is_last, "layer_norm: normalized_shape [{}] of {}; it must be the last sizes",
                fmt::join(list, ", "), to_string(input));
  for (size_t i = 1; i < call.operands.size(); ++i) {
    TESSERA_CHECK(ValueError, call.operands[i].meta.sizes == shape,
                  "layer_norm: {} as weight or bias; its sizes must be normalized_shape [{}]",
                  to_string(call.operands[i].meta), fmt::join(list, ", "));
  }
}

std::vector<TensorMeta> layer_norm_metas(const OpCall& call) {
  check_normalized_shape(call);
  const auto& input = call.operands[0].meta;
  auto sizes = input.sizes;
  for (auto dim = count_item_dims(call, 0, 1); dim < std::ssize(sizes); ++dim) {
    sizes[static_cast<size_t>(dim)] = 1;
  }
  const auto statistics = TensorMeta::contiguous(sizes, layer_statistics_dtype(call, 2));
  return {TensorMeta::contiguous(input.sizes, input.dtype), statistics, statistics};
}

// native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)

constexpr size_t kLayerNormMask = 7;

Strategies layer_norm_backward_strategies(const OpCall& call) {
  Strategies strategies;
  const bool has_input_grad = call.args[kLayerNormMask].toBoolList().get(0);
  for (int64_t dim = 0; dim < count_item_dims(call, 1, 2); ++dim) {
    strategies.push_back(shard_items_backward(call, {0, 1, 3, 4}, dim, has_input_grad));
  }
  keep_linear(strategies, call, 0);
  return strategies;
}

/// Returns metas of the gradients, with the dtypes of input, weight and bias.
std::vector<TensorMeta> layer_norm_backward_metas(const OpCall& call) {
  std::vector<TensorMeta> metas;
  const auto mask = call.args[kLayerNormMask].toBoolList();
  const auto& input = call.operands[1].meta;
  const auto shape = call.args[2].toIntVector();
  const auto find_dtype = [&](size_t arg) {
    const int64_t operand = call.operand_of_arg(arg);
    return operand >= 0 ? call.operands[static_cast<size_t>(operand)].meta.dtype : input.dtype;
  };
  if (mask.get(0)) {
    metas.push_back(TensorMeta::contiguous(input.sizes, input.dtype));
  }
  for (size_t i = 1; i < 3; ++i) {
    if (mask.get(i)) {
      metas.push_back(TensorMeta::contiguous(shape, find_dtype(4 + i)));
    }
  }
  return metas;
}

// native_group_norm(input, weight, bias, N, C, HxW, group, eps) → output, mean, rstd

/// Runs the op on one item of one pixel, so that kernel errors, such as those about dtypes, are thrown on every rank,
/// even without items. The arguments from `items_arg` on are N, C, HxW.
void ask_for_one_pixel(const OpCall& call, size_t items_arg) {
  std::vector<c10::IValue> args(call.args.begin(), call.args.end());
  args[items_arg] = 1;
  args[items_arg + 2] = 1;
  OpCall smaller = call;
  smaller.args = args;
  probe_output_metas(smaller, [](const TensorMeta& meta) {
    DimVector sizes = meta.sizes;
    for (size_t dim = 0; sizes.size() > 1 && dim < sizes.size(); ++dim) {
      sizes[dim] = dim == 1 ? sizes[dim] : 1;  // channels, or groups for statistics
    }
    return sizes;
  });
}

std::vector<TensorMeta> group_norm_metas(const OpCall& call) {
  if (numel(call.operands[0].meta) > 0) {
    ask_for_one_pixel(call, 3);
  }
  const auto& input = call.operands[0].meta;
  const auto statistics =
      TensorMeta::contiguous({call.args[3].toInt(), call.args[6].toInt()}, statistics_dtype(call, 1));
  return {TensorMeta::contiguous(input.sizes, input.dtype), statistics, statistics};
}

/// Runs a group norm with the local number of items as argument `items_arg`. Kernels divide by it, so without items the
/// outputs are empty or zero terms. `wanted` says which outputs exist.
void run_group_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan, size_t items_arg,
                    std::array<bool, 3> wanted) {
  const auto input = local_argument(op, stack, 0).toTensor();
  local_argument(op, stack, items_arg) = c10::IValue(input.size(0));
  if (input.numel() > 0) {
    op.callBoxed(stack);
    return;
  }
  set_zero_results(op, stack, plan, wanted);
}

void local_group_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  run_group_norm(op, stack, plan, 3, {true, true, true});
}

// native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask)

constexpr size_t kGroupNormMask = 9;

Strategies group_norm_backward_strategies(const OpCall& call) {
  Strategies strategies{shard_items_backward(call, {0, 1, 2, 3}, 0, call.args[kGroupNormMask].toBoolList().get(0))};
  keep_linear(strategies, call, 0);
  return strategies;
}

std::vector<TensorMeta> group_norm_backward_metas(const OpCall& call) {
  std::vector<TensorMeta> metas;
  const auto mask = call.args[kGroupNormMask].toBoolList();
  const auto& input = call.operands[1].meta;
  if (numel(input) > 0) {
    ask_for_one_pixel(call, 5);
  }
  const int64_t weight = call.operand_of_arg(4);
  const auto weight_dtype = weight >= 0 ? call.operands[static_cast<size_t>(weight)].meta.dtype : input.dtype;
  for (size_t i = 0; i < 3; ++i) {
    if (mask.get(i)) {
      metas.push_back(i == 0 ? TensorMeta::contiguous(input.sizes, input.dtype)
                             : TensorMeta::contiguous({call.args[6].toInt()}, weight_dtype));
    }
  }
  return metas;
}

void local_group_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto mask = local_argument(op, stack, kGroupNormMask).toBoolList();
  run_group_norm(op, stack, plan, 5, {mask.get(0), mask.get(1), mask.get(2)});
}

// tessera::rms_norm(x, weight, eps, weight_offset) → normed, rstd; add_rms_norm(x, residual, ...) → sum, normed, rstd

Strategies rms_norm_strategies(const OpCall& call, size_t num_items) {
  Strategies strategies;
  for (int64_t dim = 0; dim + 1 < call.operands[0].ndim(); ++dim) {
    strategies.push_back(num_items == 1 ? shard_items(call, {0}, dim) : shard_items(call, {0, 1}, dim));
  }
  return strategies;
}

// tessera::rms_norm_backward(grad, grad_sum, x, weight, rstd, weight_offset, needs_weight)

Strategies rms_norm_backward_strategies(const OpCall& call) {
  Strategies strategies;
  for (int64_t dim = 0; dim + 1 < call.operands[0].ndim(); ++dim) {
    strategies.push_back(shard_items_backward(call, {0, 1, 2, 4}, dim, /*has_input_grad=*/true));
  }
  const int64_t grad_sum = call.operand_of_arg(1);
  if (grad_sum >= 0) {
    keep_linear(strategies, call, 0, {static_cast<size_t>(grad_sum)});
  } else {
    keep_linear(strategies, call, 0);
  }
  return strategies;
}

const RegisterOpRules norm_rules([] {
  register_op_rule({"tessera::rms_norm"},
                   {.strategies = [](const OpCall& call) { return rms_norm_strategies(call, 1); }});
  register_op_rule({"tessera::add_rms_norm"},
                   {.strategies = [](const OpCall& call) { return rms_norm_strategies(call, 2); }});
  register_op_rule({"tessera::rms_norm_backward"}, {.strategies = rms_norm_backward_strategies});
  register_op_rule({"aten::native_layer_norm"},
                   {.strategies = layer_norm_strategies, .output_metas = layer_norm_metas});
  register_op_rule({"aten::native_layer_norm_backward"},
                   {.strategies = layer_norm_backward_strategies, .output_metas = layer_norm_backward_metas});
  register_op_rule({"aten::native_group_norm"},
                   {.strategies = [](const OpCall& call) { return Strategies{shard_items(call, {0}, 0)}; },
                    .local_call = local_group_norm,
                    .output_metas = group_norm_metas});
  register_op_rule({"aten::native_group_norm_backward"}, {.strategies = group_norm_backward_strategies,
                                                          .local_call = local_group_norm_backward,
                                                          .output_metas = group_norm_backward_metas});
});

}  // namespace

}  // namespace tessera
