#include "nn/hooks/python_forward.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/transformerlayer.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <variant>
#include <vector>

#include "base/error.h"
#include "nn/hooks/inference_linear.h"

namespace tessera::detail {

namespace {

using torch::nn::MultiheadAttentionImpl;

/// Queries, keys and values: [length, batch, embed_dim] each.
using Projections = std::array<at::Tensor, 3>;

void check_sizes(const char* what, const at::Tensor& tensor, at::IntArrayRef allowed) {
  TESSERA_CHECK(ValueError, tensor.sizes() == allowed, "MultiheadAttention: {} has sizes [{}]; it must have [{}]", what,
                fmt::join(tensor.sizes(), ", "), fmt::join(allowed, ", "));
}

void check_inputs(const MultiheadAttentionImpl& layer, const at::Tensor& query, const at::Tensor& key,
                  const at::Tensor& value) {
  TESSERA_CHECK(ValueError, query.dim() == 3 && key.dim() == 3 && value.dim() == 3,
                "MultiheadAttention: query, key and value have {}, {} and {} dims; each must have three, [length, "
                "batch, embed_dim], or each two, without the batch",
                query.dim(), key.dim(), value.dim());
  const auto& options = layer.options;
  const int64_t length = key.size(0), batch = query.size(1);
  check_sizes("query", query, {query.size(0), batch, options.embed_dim()});
  check_sizes("key", key, {length, batch, options.kdim()});
  check_sizes("value", value, {length, batch, options.vdim()});
}

/// Returns the mask to add to scores, undefined without a mask.
at::Tensor additive(const char* what, const at::Tensor& mask, at::ScalarType dtype) {
  if (!mask.defined() || mask.is_floating_point()) {
    return mask;
  }
  TESSERA_CHECK(ValueError, mask.scalar_type() == at::kBool,
                "MultiheadAttention: {} is {}; give bool, true where nothing is attended to, or a floating dtype, "
                "whose numbers are added to the scores",
                what, c10::toString(mask.scalar_type()));
  return at::zeros_like(mask, mask.options().dtype(dtype)).masked_fill_(mask, -std::numeric_limits<double>::infinity());
}

/// Reshapes [..., parts * dim] to [parts, ..., dim], with each part contiguous.
at::Tensor split_last(const at::Tensor& projected, int64_t parts, int64_t dim) {
  return projected.unflatten(-1, {parts, dim}).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous();
}

std::vector<at::Tensor> thirds(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.chunk(3) : std::vector<at::Tensor>(3);
}

Projections project(const MultiheadAttentionImpl& layer, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value) {
  const auto& weight = layer.in_proj_weight;
  const auto& bias = layer.in_proj_bias;
  const int64_t dim = query.size(-1);
  if (layer._qkv_same_embed_dim && key.is_same(value)) {
    if (query.is_same(key)) {
      const auto all = split_last(at::linear(query, weight, bias), 3, dim);
      return {all[0], all[1], all[2]};
    }
    const auto weights = weight.split_with_sizes({dim, 2 * dim});
    const auto biases = bias.defined() ? bias.split_with_sizes({dim, 2 * dim}) : std::vector<at::Tensor>(2);
    const auto queries = at::linear(query, weights[0], biases[0]);
    const auto others = split_last(at::linear(key, weights[1], biases[1]), 2, dim);
    return {queries, others[0], others[1]};
  }
  const auto weights = layer._qkv_same_embed_dim
                           ? thirds(weight)
                           : std::vector{layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight};
  const auto biases = thirds(bias);
  return {at::linear(query, weights[0], biases[0]), at::linear(key, weights[1], biases[1]),
          at::linear(value, weights[2], biases[2])};
}

/// Reshapes [length, batch, heads * dim] to [batch * heads, length, dim].
at::Tensor by_head(const at::Tensor& projected, int64_t heads) {
  const int64_t batch = projected.size(1), dim = projected.size(2) / heads;
  return projected.view({projected.size(0), batch * heads, dim}).transpose(0, 1);
}

/// Appends a column of zeros.
at::Tensor with_column(const at::Tensor& mask) {
  return mask.defined() ? at::constant_pad_nd(mask, {0, 1}) : mask;
}

at::Tensor with_zero_row(const at::Tensor& rows) {
  return at::cat({rows, at::zeros({rows.size(0), 1, rows.size(2)}, rows.options())}, 1);
}

/// Queries, keys and values by head, and the mask to add to scores: undefined, or [1 or batch * heads, 1 or length,
/// keys].
struct Heads {
  at::Tensor query, key, value;
  at::Tensor mask;
};

Heads make_heads(const MultiheadAttentionImpl& layer, Projections projections, at::Tensor attn_mask,
                 at::Tensor key_mask) {
  auto& [query, key, value] = projections;
  const int64_t heads = layer.options.num_heads(), batch = query.size(1), length = query.size(0);
  if (attn_mask.defined() && attn_mask.dim() == 2) {
    check_sizes("attn_mask", attn_mask, {length, key.size(0)});
    attn_mask = attn_mask.unsqueeze(0);
  } else if (attn_mask.defined()) {
    check_sizes("attn_mask", attn_mask, {batch * heads, length, key.size(0)});
  }
  if (key_mask.defined()) {
    check_sizes("key_padding_mask", key_mask, {batch, key.size(0)});
  }
  if (layer.bias_k.defined()) {
    key = at::cat({key, layer.bias_k.repeat({1, batch, 1})});
    value = at::cat({value, layer.bias_v.repeat({1, batch, 1})});
    attn_mask = with_column(attn_mask);
    key_mask = with_column(key_mask);
  }
  Heads result{.query = by_head(query, heads), .key = by_head(key, heads), .value = by_head(value, heads), .mask = {}};
  if (layer.options.add_zero_attn()) {
    result.key = with_zero_row(result.key);
    result.value = with_zero_row(result.value);
    attn_mask = with_column(attn_mask);
    key_mask = with_column(key_mask);
  }
  if (key_mask.defined()) {
    const int64_t keys = result.key.size(1);
    key_mask = key_mask.view({batch, 1, 1, keys}).expand({-1, heads, -1, -1}).reshape({batch * heads, 1, keys});
    attn_mask = attn_mask.defined() ? attn_mask + key_mask : key_mask;
  }
  result.mask = attn_mask;
  return result;
}

/// Returns [length, batch * heads, dim], and the weights of each head.
std::tuple<at::Tensor, at::Tensor> attend_with_weights(const Heads& of, double dropout_p) {
  const auto scaled = of.query * std::sqrt(1.0 / static_cast<double>(of.query.size(2)));
  const auto keys = of.key.transpose(-2, -1);
  auto weights = of.mask.defined() ? at::baddbmm(of.mask.to(scaled.dtype()), scaled, keys) : at::bmm(scaled, keys);
  weights = at::softmax(weights, -1);
  if (dropout_p > 0) {
    weights = at::dropout(weights, dropout_p, /*train=*/true);
  }
  return {at::bmm(weights, of.value).transpose(0, 1), weights};
}

/// Returns [length, batch, heads, dim], in one op.
at::Tensor attend(const Heads& of, int64_t heads, double dropout_p) {
  const int64_t batch = of.query.size(0) / heads, length = of.query.size(1), keys = of.key.size(1),
                dim = of.query.size(2);
  std::optional<at::Tensor> mask;
  if (of.mask.defined()) {
    mask = of.mask.size(0) == 1 ? of.mask.unsqueeze(0) : of.mask.view({batch, heads, -1, keys});
  }
  const auto attended = at::scaled_dot_product_attention(of.query.view({batch, heads, length, dim}),
                                                         of.key.view({batch, heads, keys, dim}),
                                                         of.value.view({batch, heads, keys, dim}), mask, dropout_p);
  return attended.permute({2, 0, 1, 3});
}

/// Computes attention without returning weights.
at::Tensor attention(torch::nn::MultiheadAttention layer, const at::Tensor& query, const at::Tensor& other,
                     const at::Tensor& mask, const at::Tensor& key_padding_mask) {
  return std::get<0>(python_forward(*layer, query, other, other, key_padding_mask, /*need_weights=*/false, mask));
}

at::Tensor activated(const torch::nn::activation_t& activation, const at::Tensor& x) {
  if (std::holds_alternative<torch::enumtype::kReLU>(activation)) {
    return at::relu(x);
  }
  if (std::holds_alternative<torch::enumtype::kGELU>(activation)) {
    return at::gelu(x);
  }
  return std::get<std::function<at::Tensor(const at::Tensor&)>>(activation)(x);
}

/// Runs the MLP of an encoder's or decoder's layer.
template <class Layer>
at::Tensor feed_forward(Layer& layer, const at::Tensor& x) {
  const auto inner = activated(layer.options.activation(), python_forward(*layer.linear1, x));
  return python_forward(*layer.linear2, layer.dropout->forward(inner));
}

}  // namespace

at::Tensor python_forward(torch::nn::LinearImpl& layer, const at::Tensor& input, const LinearAdapter* adapter) {
  auto output = inference_linear(input, layer.weight, layer.bias);
  return adapter ? adapter->add_to(output, input) : output;
}

std::tuple<at::Tensor, at::Tensor> python_forward(MultiheadAttentionImpl& layer, const at::Tensor& query,
                                                  const at::Tensor& key, const at::Tensor& value,
                                                  const at::Tensor& key_padding_mask, bool need_weights,
                                                  const at::Tensor& attn_mask, bool average_attn_weights) {
  if (query.dim() == 2 && key.dim() == 2 && value.dim() == 2) {
    // In this order, because backward adds up their gradients in reverse order.
    const auto queries = query.unsqueeze(1), keys = key.unsqueeze(1), values = value.unsqueeze(1);
    const auto key_mask = key_padding_mask.defined() ? key_padding_mask.unsqueeze(0) : key_padding_mask;
    const auto [output, weights] =
        python_forward(layer, queries, keys, values, key_mask, need_weights, attn_mask, average_attn_weights);
    return {output.squeeze(1), weights.defined() ? weights.squeeze(0) : weights};
  }
  check_inputs(layer, query, key, value);
  const auto dtype = query.scalar_type();
  const auto& options = layer.options;
  const int64_t heads = options.num_heads(), length = query.size(0), batch = query.size(1);
  const auto of = make_heads(layer, project(layer, query, key, value), additive("attn_mask", attn_mask, dtype),
                             additive("key_padding_mask", key_padding_mask, dtype));
  const double dropout_p = layer.is_training() ? options.dropout() : 0;
  at::Tensor attended, weights;
  if (need_weights) {
    std::tie(attended, weights) = attend_with_weights(of, dropout_p);
    weights = weights.view({batch, heads, length, of.key.size(1)});
    weights = average_attn_weights ? weights.mean(1) : weights;
  } else {
    attended = attend(of, heads, dropout_p);
  }
  const int64_t dim = options.embed_dim();
  const auto output = python_forward(*layer.out_proj, attended.reshape({length * batch, dim}));
  return {output.view({length, batch, dim}), weights};
}

at::Tensor python_forward(torch::nn::TransformerEncoderLayerImpl& layer, const at::Tensor& src,
                          const at::Tensor& src_mask, const at::Tensor& src_key_padding_mask) {
  const auto attended = attention(layer.self_attn, src, src, src_mask, src_key_padding_mask);
  const auto x = layer.norm1->forward(src + layer.dropout1->forward(attended));
  return layer.norm2->forward(x + layer.dropout2->forward(feed_forward(layer, x)));
}

at::Tensor python_forward(torch::nn::TransformerDecoderLayerImpl& layer, const at::Tensor& tgt,
                          const at::Tensor& memory, const at::Tensor& tgt_mask, const at::Tensor& memory_mask,
                          const at::Tensor& tgt_key_padding_mask, const at::Tensor& memory_key_padding_mask) {
  auto attended = attention(layer.self_attn, tgt, tgt, tgt_mask, tgt_key_padding_mask);
  auto x = layer.norm1->forward(tgt + layer.dropout1->forward(attended));
  attended = attention(layer.multihead_attn, x, memory, memory_mask, memory_key_padding_mask);
  x = layer.norm2->forward(x + layer.dropout2->forward(attended));
  return layer.norm3->forward(x + layer.dropout3->forward(feed_forward(layer, x)));
}

}  // namespace tessera::detail
