#include "models/decoder.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "fused/rotary.h"
#include "models/rotary.h"
#include "nn/hooks/inference_linear.h"
#include "nn/hooks/linear_adapter.h"
#include "parallel/linear_cross_entropy.h"

namespace tessera::models {

namespace {

nn::Linear make_linear(int64_t in, int64_t out, bool bias) {
  return nn::Linear(nn::LinearOptions(in, out).bias(bias));
}

/// Splits features into heads: [batch, length, heads * head_dim] -> [batch, length, heads, head_dim].
at::Tensor split_heads(const at::Tensor& features, int64_t head_dim) {
  const auto split = features.view({features.size(0), features.size(1), features.size(2) / head_dim, head_dim});
  // If ranks have features of half a head, the view has gathered them, and each rank continues with its own heads.
  return is_dtensor(features) ? redistribute(split, placements(features)) : split;
}

/// Returns a table that is equal on all ranks, as an operand for `x`, which may be a DTensor.
at::Tensor beside(const at::Tensor& x, const at::Tensor& table) {
  return is_dtensor(x) ? from_local(table, device_mesh(x), Placements(placements(x).size(), Replicate())) : table;
}

/// Repeats each group's key or value [batch, heads, length, head_dim] for each of its query heads.
at::Tensor repeat_heads(const at::Tensor& x, int64_t times) {
  if (times == 1) {
    return x;
  }
  const int64_t batch = x.size(0), heads = x.size(1), length = x.size(2), dim = x.size(3);
  return x.unsqueeze(2).expand({batch, heads, times, length, dim}).reshape({batch, heads * times, length, dim});
}

/// Returns a mask to add to scores so that only `seen` tokens count.
at::Tensor additive_mask(const at::Tensor& seen, const at::TensorOptions& options) {
  return at::zeros(seen.sizes(), options).masked_fill_(seen.logical_not(), -std::numeric_limits<double>::infinity());
}

at::Tensor causal_mask(int64_t length, const at::TensorOptions& options) {
  return additive_mask(at::ones({length, length}, options.dtype(at::kBool)).tril(), options);
}

/// Returns the start of each token's segment in its row.
at::Tensor segment_starts(const at::Tensor& segment_ids) {
  const int64_t length = segment_ids.size(1);
  const auto is_first = at::ones_like(segment_ids, at::kBool);
  is_first.narrow(1, 1, length - 1).copy_(segment_ids.narrow(1, 1, length - 1) != segment_ids.narrow(1, 0, length - 1));
  const auto indices = at::arange(length, segment_ids.options());
  return std::get<0>((is_first * indices).cummax(1));
}

at::Tensor softcapped(const at::Tensor& x, double cap) {
  return (x / cap).tanh() * cap;
}

}  // namespace

NormImpl::NormImpl(int64_t size, const DecoderConfig& config) : kind(config.norm), eps(config.norm_eps) {
  weight = register_parameter("weight", at::ones({size}));
  if (kind == NormKind::Layer) {
    bias = register_parameter("bias", at::zeros({size}));
  }
  NormImpl::reset_parameters();
}

void NormImpl::reset_parameters() {
  const c10::NoGradGuard no_grad;
  weight.fill_(kind == NormKind::OffsetRms ? 0 : 1);
  if (bias.defined()) {
    bias.zero_();
  }
}

at::Tensor NormImpl::forward(const at::Tensor& x) {
  if (kind == NormKind::Layer) {
    return at::layer_norm(x, weight.sizes(), weight, bias, eps);
  }
  return rms_norm(x, weight, rms());
}

SumAndNorm NormImpl::add(const at::Tensor& x, const at::Tensor& y) {
  if (kind == NormKind::Layer) {
    const auto sum = x + y;
    return {.sum = sum, .normed = forward(sum)};
  }
  return add_rms_norm(x, y, weight, rms());
}

RmsNorm NormImpl::rms() const {
  return {.eps = eps, .weight_offset = kind == NormKind::OffsetRms ? 1.0 : 0.0};
}

AttentionImpl::AttentionImpl(const DecoderConfig& config, int64_t number)
    : layer(number),
      heads(config.num_attention_heads),
      key_value_heads(config.num_key_value_heads),
      head_dim(config.head_dim),
      scale(config.attention_scale / (config.scale_by_layer ? static_cast<double>(number + 1) : 1)),
      softcap(config.attention_softcap) {
  const int64_t dim = config.hidden_size;
  q_proj = register_module("q_proj", make_linear(dim, heads * head_dim, config.query_bias));
  k_proj = register_module("k_proj", make_linear(dim, key_value_heads * head_dim, config.query_bias));
  v_proj = register_module("v_proj", make_linear(dim, key_value_heads * head_dim, config.query_bias));
  o_proj = register_module("o_proj", make_linear(heads * head_dim, dim, config.output_bias));
  if (config.qk_norm) {
    q_norm = register_module("q_norm", Norm(head_dim, config));
    k_norm = register_module("k_norm", Norm(head_dim, config));
  }
}

at::Tensor AttentionImpl::forward(at::Tensor x, Positions positions) {
  auto query = split_heads(q_proj(x), head_dim);
  auto key = split_heads(k_proj(x), head_dim);
  auto value = split_heads(v_proj(x), head_dim).transpose(1, 2);
  if (!q_norm.is_empty()) {
    query = q_norm(query);
    key = k_norm(key);
  }
  query = query.transpose(1, 2);
  key = key.transpose(1, 2);
  if (positions.cos.defined()) {
    query = rotate_positions(query, beside(query, positions.cos), beside(query, positions.sin));
    key = rotate_positions(key, beside(key, positions.cos), beside(key, positions.sin));
  }
  if (positions.cache) {
    positions.cache->append(static_cast<size_t>(layer), key, value);
  }
  const int64_t batch = query.size(0), length = query.size(2), group = heads / key_value_heads;
  if (length == 1) {  // treats a group's queries as positions, so that keys and values need no copies
    query = query.reshape({batch, key_value_heads, group, head_dim});
  } else {
    key = repeat_heads(key, group);
    value = repeat_heads(value, group);
  }
  const bool is_causal = !positions.mask.defined() && length > 1;
  at::Tensor attended;
  if (softcap) {
    auto scores = softcapped(query.matmul(key.transpose(-2, -1)) * scale, *softcap);
    if (is_causal || positions.mask.defined()) {
      scores = scores + beside(query, is_causal ? causal_mask(length, query.options()) : positions.mask);
    }
    attended = scores.softmax(-1, at::kFloat).to(query.scalar_type()).matmul(value);
  } else {
    std::optional<at::Tensor> mask;
    if (positions.mask.defined()) {
      mask = beside(query, positions.mask);
    }
    attended = at::scaled_dot_product_attention(query, key, value, mask, /*dropout_p=*/0.0, is_causal, scale);
  }
  return o_proj(length == 1 ? attended.reshape({batch, 1, heads * head_dim})
                            : attended.transpose(1, 2).reshape({batch, length, heads * head_dim}));
}

MlpImpl::MlpImpl(const DecoderConfig& config) : activation(config.activation) {
  const int64_t dim = config.hidden_size, inner = config.intermediate_size;
  if (config.gated_mlp) {
    gate_proj = register_module("gate_proj", make_linear(dim, inner, config.mlp_bias));
  }
  up_proj = register_module("up_proj", make_linear(dim, inner, config.mlp_bias));
  down_proj = register_module("down_proj", make_linear(inner, dim, config.mlp_bias));
}

at::Tensor MlpImpl::forward(at::Tensor x) {
  if (gate_proj.is_empty()) {
    return down_proj(activate(up_proj(x), activation));
  }
  const auto gate = gate_proj(x);
  return down_proj(activate_gate(gate, up_proj(x), activation));
}

DecoderLayerImpl::DecoderLayerImpl(const DecoderConfig& config, int64_t layer) {
  const auto add_norm = [&](const char* name) { return register_module(name, Norm(config.hidden_size, config)); };
  attention_norm = add_norm("attention_norm");
  self_attn = register_module("self_attn", Attention(config, layer));
  mlp_norm = add_norm("mlp_norm");
  if (config.is_sparse(layer)) {
    moe = register_module("mlp", Moe(config));
  } else {
    mlp = register_module("mlp", Mlp(config));
  }
  if (config.sandwich_norms) {
    attention_out_norm = add_norm("attention_out_norm");
    mlp_out_norm = add_norm("mlp_out_norm");
  }
}

at::Tensor DecoderLayerImpl::forward(at::Tensor x, Positions positions) {
  auto attended = self_attn(attention_norm(x), std::move(positions));
  if (!attention_out_norm.is_empty()) {
    attended = attention_out_norm(attended);
  }
  at::Tensor normed;
  if (mlp_norm->has_hooks()) {  // hooks see only the norm
    x = x + attended;
    normed = mlp_norm(x);
  } else {
    const auto added = mlp_norm->add(x, attended);
    x = added.sum;
    normed = added.normed;
  }
  auto features = mlp.is_empty() ? moe(normed) : mlp(normed);
  return x + (mlp_out_norm.is_empty() ? features : mlp_out_norm(features));
}

at::Tensor TiedLinearImpl::forward(const at::Tensor& x) {
  return detail::inference_linear(x, weight, {});
}

DecoderImpl::DecoderImpl(const DecoderConfig& given) : config(given) {
  check_config(config);
  auto options = nn::EmbeddingOptions(config.vocab_size, config.hidden_size);
  options.padding_idx(config.padding_idx);
  embed_tokens = register_module("embed_tokens", nn::Embedding(options));
  if (!config.rotary) {
    embed_positions =
        register_module("embed_positions", nn::Embedding(config.max_position_embeddings, config.hidden_size));
  }
  auto list = register_module("layers", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    layers.emplace_back(config, layer);
    list->push_back(layers.back().ptr());
  }
  norm = register_module("norm", Norm(config.hidden_size, config));
  if (config.tie_word_embeddings) {
    tied_lm_head = register_module("lm_head", TiedLinear(embed_tokens->weight));
  } else {
    lm_head = register_module("lm_head", make_linear(config.hidden_size, config.vocab_size, false));
  }
}

/// Positions of the tokens of a call.
struct DecoderImpl::TokenPlaces {
  int64_t past = 0;            // earlier tokens in a row
  int64_t length = 0;          // of this call
  at::Tensor starts = {};      // [batch, length]: start of segments; undefined: 0
  at::Tensor positions = {};   // [1 or batch, length], within segments
  int64_t most_positions = 0;  // exclusive limit of positions; exact if above max_position_embeddings
};

DecoderImpl::TokenPlaces DecoderImpl::find_places(const at::Tensor& ids, const DecoderInputs& inputs) const {
  TESSERA_CHECK(ValueError, ids.dim() == 2, "Decoder: ids have {} dims; give [batch, length]", ids.dim());
  TESSERA_CHECK(
      ValueError,
      !inputs.labels.defined() || (inputs.labels.sizes() == ids.sizes() && !inputs.cache && inputs.logits_to_keep == 0),
      "Decoder: labels are {}; they must be of the ids' sizes, {}, without cache and logits_to_keep",
      inputs.labels.sizes(), ids.sizes());
  TokenPlaces places{.past = inputs.cache ? inputs.cache->length() : 0, .length = ids.size(1)};
  const int64_t end = places.past + places.length;
  if (inputs.cache) {
    TESSERA_CHECK(StateError, !c10::GradMode::is_enabled(), "Decoder: a forward with a cache needs a NoGradGuard");
    TESSERA_CHECK(ValueError, end <= inputs.cache->capacity(),
                  "Decoder: {} tokens after {}, but the cache has a capacity of {}", places.length, places.past,
                  inputs.cache->capacity());
    places.starts = inputs.cache->starts_;
  }
  if (inputs.segment_ids.defined()) {
    TESSERA_CHECK(ValueError, inputs.segment_ids.sizes() == ids.sizes(),
                  "Decoder: segment_ids are {}; they must be of the ids' sizes, {}", inputs.segment_ids.sizes(),
                  ids.sizes());
    TESSERA_CHECK(ValueError, places.past == 0,
                  "Decoder: segment_ids beside a cache of {} tokens; give them with an empty cache", places.past);
    places.starts = segment_starts(inputs.segment_ids);
  }
  places.positions = at::arange(places.past, end, ids.options()).unsqueeze(0);
  if (places.starts.defined()) {
    places.positions = places.positions - places.starts;
  }
  places.most_positions = end;
  if (places.starts.defined() && end > config.max_position_embeddings) {
    places.most_positions = places.positions.max().item<int64_t>() + 1;
  }
  TESSERA_CHECK(ValueError, config.rotary || places.most_positions <= config.max_position_embeddings,
                "Decoder: {} tokens, but the model has {} learned positions", places.most_positions,
                config.max_position_embeddings);
  return places;
}

Positions DecoderImpl::make_positions(const RotaryConfig* rotary, bool slides, const TokenPlaces& places,
                                      const at::TensorOptions& options) const {
  Positions positions;
  if (rotary) {
    const auto tables = rotary_tables(*rotary, config, places.positions, places.most_positions, options);
    const bool by_row = places.starts.defined();
    positions.cos = by_row ? tables.cos.unsqueeze(1) : tables.cos.squeeze(0);
    positions.sin = by_row ? tables.sin.unsqueeze(1) : tables.sin.squeeze(0);
  }
  const int64_t end = places.past + places.length;
  const bool needs_window = slides && *config.sliding_window < end;
  const bool needs_past = places.past > 0 && places.length > 1;
  if (needs_window || needs_past || places.starts.defined()) {
    const auto indices = at::arange(end, options.dtype(at::kLong));
    const auto own = indices.narrow(0, places.past, places.length).unsqueeze(1);
    auto seen = indices <= own;
    if (needs_window) {
      seen = seen.logical_and(indices > own - *config.sliding_window);
    }
    if (places.starts.defined()) {
      seen = seen.logical_and(indices >= places.starts.unsqueeze(-1)).unsqueeze(1);
    }
    positions.mask = additive_mask(seen, options);
  }
  return positions;
}

at::Tensor DecoderImpl::forward(const at::Tensor& ids, DecoderInputs inputs) {
  const auto places = find_places(ids, inputs);
  auto x = embed_tokens(ids);
  if (config.scale_embedding) {  // rounded to the weights' dtype, as in the models' training
    x = x * at::scalar_tensor(std::sqrt(static_cast<double>(config.hidden_size)), x.scalar_type()).item<double>();
  }
  if (!config.rotary) {
    x = x + embed_positions(places.positions);
  }
  const auto options = at::TensorOptions(x.device()).dtype(x.scalar_type());
  const auto* const rotary = config.rotary ? &*config.rotary : nullptr;
  auto full = make_positions(rotary, false, places, options);
  auto sliding = config.sliding_window
                     ? make_positions(config.local_rotary ? &*config.local_rotary : rotary, true, places, options)
                     : Positions();
  full.cache = sliding.cache = inputs.cache;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    x = layers[layer](x, config.is_sliding(static_cast<int64_t>(layer)) ? sliding : full);
  }
  if (inputs.cache) {
    inputs.cache->length_ += places.length;
    inputs.cache->starts_ =
        places.starts.defined() ? places.starts.narrow(1, places.starts.size(1) - 1, 1) : at::Tensor();
  }
  x = norm(x);
  if (inputs.logits_to_keep > 0 && inputs.logits_to_keep < places.length) {
    x = x.narrow(1, places.length - inputs.logits_to_keep, inputs.logits_to_keep);
  }
  return inputs.labels.defined() ? loss_of(x, inputs) : logits_of(x);
}

at::Tensor DecoderImpl::logits_of(const at::Tensor& x) {
  const auto logits = config.tie_word_embeddings ? tied_lm_head(x) : lm_head(x);
  return config.logit_softcap ? softcapped(logits, *config.logit_softcap) : logits;
}

at::Tensor DecoderImpl::loss_of(const at::Tensor& x, const DecoderInputs& inputs) {
  if (!config.tie_word_embeddings && lm_head->find<LinearAdapter>()) {
    return next_token_loss(logits_of(x), inputs.labels, inputs.label_count);
  }
  const auto& weight = config.tie_word_embeddings ? embed_tokens->weight : lm_head->weight;
  TESSERA_CHECK(
      StateError, !is_dtensor(weight) || device_mesh(weight).axis_names() == std::vector<std::string>{"tp"},
      "Decoder: labels, but the output layer's weight is sharded over the axes [{}]; \"tp\" alone is allowed. "
      "Do not make the layer a unit of fully_shard, or use next_token_loss of the logits",
      fmt::join(device_mesh(weight).axis_names(), ", "));
  const int64_t batch = inputs.labels.size(0), length = inputs.labels.size(1);
  const auto next =
      at::cat({inputs.labels.narrow(1, 1, length - 1), at::full({batch, 1}, -100, inputs.labels.options())}, 1);
  return linear_cross_entropy(x, weight, next, {.count = inputs.label_count, .softcap = config.logit_softcap});
}

at::Tensor router_aux_loss(Decoder& model) {
  const auto& moe = model->config.moe;
  TESSERA_CHECK(StateError, moe && moe->output_router_logits,
                "router_aux_loss: the model keeps no router logits; set output_router_logits of its config's moe");
  std::vector<at::Tensor> logits;
  for (auto& layer : model->layers) {
    if (!layer->moe.is_empty()) {
      logits.push_back(std::exchange(layer->moe->router_logits, {}));
      TESSERA_CHECK(StateError, logits.back().defined(),
                    "router_aux_loss: there was no forward since the last call, or since the model was made");
    }
  }
  return moe->router_aux_loss_coef * load_balancing_loss(logits, moe->num_experts_per_tok);
}

at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& labels, std::optional<double> count) {
  const int64_t length = labels.size(1);
  const auto predicted = logits.narrow(1, 0, length - 1).to(at::kFloat).flatten(0, 1);
  const auto next = labels.narrow(1, 1, length - 1).flatten();
  if (!count) {
    return at::cross_entropy_loss(predicted, next);
  }
  return at::cross_entropy_loss(predicted, next, /*weight=*/{}, at::Reduction::Sum) / *count;
}

}  // namespace tessera::models
