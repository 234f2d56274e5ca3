#pragma once
// A decoder-only transformer that computes what the models of Hugging Face's transformers compute, by its config.
//
//   models::Decoder model(models::read_config("llama/config.json"));     // random weights; pretrained.h loads them
//   at::Tensor logits = model(ids);                                      // [batch, length] -> [batch, length, vocab]
//   models::next_token_loss(logits, ids).backward();
//
// Modules have hook points, and may be DTensors on a mesh: decoder_layout.h shards a model. Names of parameters:
//
//   embed_tokens, embed_positions (learned positions), norm, lm_head (unless tied to embed_tokens)
//   layers.0.attention_norm, .attention_out_norm (sandwich), .mlp_norm, .mlp_out_norm (sandwich)
//   layers.0.self_attn.q_proj, .k_proj, .v_proj, .o_proj, .q_norm, .k_norm
//   layers.0.mlp.gate_proj (gated), .up_proj, .down_proj
//
// Dropout is not applied. Thread safety: like a torch::nn::Module.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "models/decoder_config.h"
#include "nn/embedding.h"
#include "nn/hooked.h"
#include "nn/linear.h"
#include "nn/reset_parameters.h"

namespace tessera::models {

/// Normalizes the last dim, of `size`, by config.norm.
struct NormImpl : torch::nn::Module, ResettableParameters {
  NormImpl(int64_t size, const DecoderConfig& config);
  at::Tensor forward(const at::Tensor& x);
  void reset_parameters() override;

  NormKind kind;
  double eps;
  at::Tensor weight;
  at::Tensor bias;  // undefined unless NormKind::Layer
};
TESSERA_MODULE(Norm);

/// Holds what a layer needs to know of positions: the same for all layers of a kind.
struct Positions {
  at::Tensor cos;  // [length, head_dim]; undefined without rotary positions
  at::Tensor sin;
  at::Tensor mask;  // [length, length], added to scores; undefined: causal
};
inline auto tensor_fields(Positions& positions) {
  return std::tie(positions.cos, positions.sin, positions.mask);
}

struct AttentionImpl : torch::nn::Module {
  AttentionImpl(const DecoderConfig& config, int64_t layer);
  at::Tensor forward(at::Tensor x, Positions positions);

  int64_t heads;
  int64_t key_value_heads;
  int64_t head_dim;
  double scale;
  std::optional<double> softcap;
  nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
  Norm q_norm{nullptr}, k_norm{nullptr};  // null unless config.qk_norm
};
TESSERA_MODULE(Attention);

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const DecoderConfig& config);
  at::Tensor forward(at::Tensor x);

  Activation activation;
  nn::Linear gate_proj{nullptr};  // null unless config.gated_mlp
  nn::Linear up_proj{nullptr}, down_proj{nullptr};
};
TESSERA_MODULE(Mlp);

/// Computes x + attention(norm(x)), then x + mlp(norm(x)); sandwich norms come before each sum.
struct DecoderLayerImpl : torch::nn::Module {
  DecoderLayerImpl(const DecoderConfig& config, int64_t layer);
  at::Tensor forward(at::Tensor x, Positions positions);

  Norm attention_norm{nullptr}, attention_out_norm{nullptr};
  Attention self_attn{nullptr};
  Norm mlp_norm{nullptr}, mlp_out_norm{nullptr};
  Mlp mlp{nullptr};
};
TESSERA_MODULE(DecoderLayer);

/// Output layer whose weight is another module's parameter, which is registered there alone.
struct TiedLinearImpl : torch::nn::Module {
  explicit TiedLinearImpl(at::Tensor weight) : weight(std::move(weight)) {}
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;
};
TESSERA_MODULE(TiedLinear);

struct DecoderImpl : torch::nn::Module {
  /// Builds the model with random weights. Throws ValueError like check_config.
  explicit DecoderImpl(const DecoderConfig& given);
  /// Returns logits of the token after each of `ids` [batch, length]. Throws ValueError for other dims and, with
  /// learned positions, for more than config.max_position_embeddings of them.
  at::Tensor forward(const at::Tensor& ids);

  DecoderConfig config;
  std::string source = {};  // folder that from_pretrained read
  nn::Embedding embed_tokens{nullptr};
  nn::Embedding embed_positions{nullptr};  // null with rotary positions
  std::vector<DecoderLayer> layers;
  Norm norm{nullptr};
  nn::Linear lm_head{nullptr};       // null if tied
  TiedLinear tied_lm_head{nullptr};  // null unless tied; registered as lm_head too

 private:
  Positions make_positions(const RotaryConfig* rotary, bool slides, const at::Tensor& x) const;
};
TESSERA_MODULE(Decoder);

/// Returns the mean of -log p of each next token, in float32. `labels` [batch, length] are usually the ids themselves;
/// -100 marks those that do not count.
at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& labels);

}  // namespace tessera::models
