// Convolutions: items are independent of each other. Without groups, channels act like the dims of a matrix product:
// output channels are its columns, and input channels its contracted dim. Sharded images are gathered.

#include <ATen/ops/sum.h>

#include <array>

#include "base/error.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

// Arguments of convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups); the
// backward, (grad, input, weight, bias_sizes, stride, ..., groups, output_mask), has those from stride on one later.
constexpr size_t kBias = 2;
constexpr size_t kTransposed = 6;
constexpr size_t kBackwardBiasSizes = 3;
constexpr size_t kBackwardMask = 10;

struct WeightDims {
  int64_t out, in;
};

WeightDims weight_dims(bool transposed) {
  return transposed ? WeightDims{.out = 1, .in = 0} : WeightDims{.out = 0, .in = 1};
}

/// Throws, on every rank, for arguments that only the kernels of ranks with items, or with certain shards, would
/// reject.
void check_channels(const OpCall& call) {
  const auto& input = call.operands[0].meta;
  const auto& weight = call.operands[1].meta;
  const bool transposed = call.args[kTransposed].toBool();
  const int64_t groups = call.args[8].toInt();
  const int64_t own = weight.sizes[0], shared = weight.sizes[1] * groups;  // output and input channels
  TESSERA_CHECK(
      ValueError,
      groups > 0 && own % groups == 0 && input.sizes[1] == (transposed ? own : shared) && input.dtype == weight.dtype,
      "aten::convolution: input {} and weight {} in {} groups{}; they need one dtype, and the input {} channels",
      to_string(input), to_string(weight), groups, transposed ? ", transposed" : "", transposed ? own : shared);
  const int64_t out = transposed ? shared : own;
  const auto& bias = call.operands.back().meta;
  TESSERA_CHECK(ValueError, call.operands.size() < 3 || (bias.sizes == DimVector{out} && bias.dtype == input.dtype),
                "aten::convolution: bias {}; it needs {} elements, one an output channel, in the dtype of input {}",
                to_string(bias), out, to_string(input));
}

void check_convolution_window(const OpCall& call) {
  for (size_t i = 0; i + 2 < call.operands[0].meta.sizes.size(); ++i) {
    const int64_t stride = spatial_entry(call.args[3], i, 1), padding = spatial_entry(call.args[4], i, 0),
                  dilation = spatial_entry(call.args[5], i, 1);
    TESSERA_CHECK(ValueError, stride > 0 && padding >= 0 && dilation > 0,
                  "aten::convolution: stride {}, padding {}, dilation {}; no padding is negative, the others are at "
                  "least 1",
                  stride, padding, dilation);
  }
}

std::vector<TensorMeta> convolution_metas(const OpCall& call) {
  check_channels(call);
  check_convolution_window(call);
  const auto& input = call.operands[0].meta;
  const auto& weight = call.operands[1].meta;
  const bool transposed = call.args[kTransposed].toBool();
  DimVector sizes{input.sizes[0], transposed ? weight.sizes[1] * call.args[8].toInt() : weight.sizes[0]};
  for (size_t i = 0; i + 2 < input.sizes.size(); ++i) {
    const int64_t stride = spatial_entry(call.args[3], i, 1);
    const int64_t padding = 2 * spatial_entry(call.args[4], i, 0);
    const int64_t kernel = spatial_entry(call.args[5], i, 1) * (weight.sizes[i + 2] - 1) + 1;
    const int64_t length = input.sizes[i + 2];
    const int64_t room = length + padding - kernel;
    sizes.push_back(transposed ? (length - 1) * stride - padding + kernel + spatial_entry(call.args[7], i, 0)
                    : room < 0 || weight.sizes[i + 2] == 0 ? 0
                                                           : room / stride + 1);
  }
  TESSERA_CHECK(ValueError, std::all_of(sizes.begin() + 2, sizes.end(), [](int64_t length) { return length > 0; }),
                "aten::convolution: the window of weight {} does not fit into input {}; pad the input",
                to_string(call.operands[1].meta), to_string(input));
  return {TensorMeta::contiguous(sizes, input.dtype)};
}

/// Operands are (input, weight) or (input, weight, bias).
Strategies convolution_strategies(const OpCall& call) {
  const bool has_bias = call.operands.size() > 2;
  const auto weight = weight_dims(call.args[kTransposed].toBool());
  const auto cut = [&](int64_t input_dim, int64_t weight_dim, int64_t bias_dim, int64_t out_dim) {
    DimVector operands{input_dim, weight_dim};
    if (has_bias) {
      operands.push_back(bias_dim);
    }
    return sharded(call, operands, {out_dim}, Partial());
  };
  Strategies strategies{cut(0, kNone, kNone, 0)};
  if (call.args[8].toInt() == 1) {
    strategies.push_back(cut(kNone, weight.out, 0, 1));
    strategies.push_back(cut(1, weight.in, kNone, kNone));
  }
  keep_linear(strategies, call, 0);
  keep_linear(strategies, call, 1);
  return strategies;
}

/// Returns whether this rank adds the bias: if results are Partial, only the first rank does.
bool adds_bias(const DTensorSpec& out) {
  for (size_t axis = 0; axis < out.placements().size(); ++axis) {
    if (out.placements()[axis] == Partial() && out.mesh().coordinate()[axis] != 0) {
      return false;
    }
  }
  return true;
}

void local_convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  if (is_empty_shard(op, stack, plan.operands[0], 0) || is_empty_shard(op, stack, plan.operands[1], 1)) {
    set_zero_results(op, stack, plan, {true});
    return;
  }
  if (!plan.outputs_from_results && !adds_bias(*plan.outputs[0])) {
    local_argument(op, stack, kBias) = c10::IValue();
  }
  op.callBoxed(stack);
}

std::vector<TensorMeta> backward_metas(const OpCall& call) {
  std::vector<TensorMeta> metas;
  const auto mask = call.args[kBackwardMask].toBoolList();
  const auto& grad = call.operands[0].meta;
  for (const size_t i : {1, 2}) {
    if (mask.get(i - 1)) {
      metas.push_back(TensorMeta::contiguous(call.operands[i].meta.sizes, call.operands[i].meta.dtype));
    }
  }
  if (mask.get(2)) {
    metas.push_back(TensorMeta::contiguous({grad.sizes[1]}, grad.dtype));
  }
  return metas;
}

/// `operands`: dims of grad, input and weight; `results`: placements of the three gradients.
AxisStrategy shard_backward(const OpCall& call, at::IntArrayRef operands, const std::array<Placement, 3>& results) {
  AxisStrategy strategy = sharded(call, operands, DimVector(call.outputs.size(), kNone));
  const auto mask = call.args[kBackwardMask].toBoolList();
  strategy.outputs.clear();
  for (size_t i = 0; i < results.size(); ++i) {
    if (mask.get(i)) {
      strategy.outputs.push_back(results[i]);
    }
  }
  return strategy;
}

Strategies backward_strategies(const OpCall& call) {
  const auto weight = weight_dims(call.args[kTransposed + 1].toBool());
  Strategies strategies{shard_backward(call, {0, 0, kNone}, {Shard(0), Partial(), Partial()})};
  if (call.args[9].toInt() == 1) {
    strategies.push_back(shard_backward(call, {1, kNone, weight.out}, {Partial(), Shard(weight.out), Shard(0)}));
    strategies.push_back(shard_backward(call, {kNone, 1, weight.in}, {Shard(1), Shard(weight.in), Replicate()}));
  }
  keep_linear(strategies, call, 0);
  return strategies;
}

/// Returns the sum of `grad` over all dims but the channels, even if other shards are empty.
at::Tensor bias_gradient(const at::Tensor& grad) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < grad.dim(); ++dim) {
    if (dim != 1) {
      dims.push_back(dim);
    }
  }
  return at::sum(grad, dims);
}

void local_convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto grad = local_argument(op, stack, 0).toTensor();
  const auto mask = local_argument(op, stack, kBackwardMask).toBoolList();
  const bool empty = is_empty_shard(op, stack, plan.operands[0], 0) || is_empty_shard(op, stack, plan.operands[1], 1) ||
                     is_empty_shard(op, stack, plan.operands[2], 2);
  if (!empty) {
    if (!local_argument(op, stack, kBackwardBiasSizes).isNone()) {
      local_argument(op, stack, kBackwardBiasSizes) = c10::IValue(at::IntArrayRef({grad.size(1)}));
    }
    op.callBoxed(stack);
    return;
  }
  set_zero_results(op, stack, plan, std::array<bool, 3>{mask.get(0), mask.get(1), mask.get(2)});
  if (mask.get(2)) {
    stack->back() = bias_gradient(grad);
  }
}

/// Excludes an input without a batch dim, and one without channels, for which ATen returns no channels whatever the
/// weight.
template <size_t input>
bool is_unusual(const OpCall& call) {
  const auto& meta = call.operands[input].meta;
  return meta.sizes.size() != call.operands[input + 1].meta.sizes.size() || meta.sizes.size() < 3 || meta.sizes[1] == 0;
}

const RegisterOpRules convolution_rules([] {
  register_op_rule({"aten::convolution"}, {.strategies = convolution_strategies,
                                           .local_call = local_convolution,
                                           .output_metas = convolution_metas,
                                           .requires_replicated = is_unusual<0>,
                                           .op_takes_shards = true});
  register_op_rule({"aten::convolution_backward"}, {.strategies = backward_strategies,
                                                    .local_call = local_convolution_backward,
                                                    .output_metas = backward_metas,
                                                    .requires_replicated = is_unusual<1>});
});

}  // namespace

}  // namespace tessera
