#pragma once
// Decoder-only transformer that computes the same as the models of Hugging Face's transformers, according to its
// config.
//
//   models::Decoder model(models::read_config("llama/config.json"));     // random weights; pretrained.h loads them
//   at::Tensor logits = model(ids);                                      // [batch, length] -> [batch, length, vocab]
//   models::next_token_loss(logits, ids).backward();
//
// Modules have hook points and may be DTensors on a mesh; decoder_layout.h distributes a model. Parameter names:
//
//   embed_tokens, embed_positions (learned positions), norm, lm_head (unless tied to embed_tokens)
//   layers.0.attention_norm, .attention_out_norm (sandwich), .mlp_norm, .mlp_out_norm (sandwich)
//   layers.0.self_attn.q_proj, .k_proj, .v_proj, .o_proj, .q_norm, .k_norm
//   layers.0.mlp.gate_proj (gated), .up_proj, .down_proj
//   layers.0.mlp.router, .experts.gate_proj, .experts.up_proj, .experts.down_proj (with experts)
//
// Dropout is not applied. Thread safety: like a torch::nn::Module.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fused/rms_norm.h"
#include "models/decoder_config.h"
#include "models/key_value_cache.h"
#include "models/moe.h"
#include "nn/embedding.h"
#include "nn/hooked.h"
#include "nn/linear.h"
#include "nn/reset_parameters.h"

namespace tessera::models {

/// Normalizes the last dim, of `size`, by config.norm.
struct NormImpl : torch::nn::Module, ResettableParameters {
  NormImpl(int64_t size, const DecoderConfig& config);
  at::Tensor forward(const at::Tensor& x);
  /// Returns x + y and its forward, in one pass if that is faster.
  SumAndNorm add(const at::Tensor& x, const at::Tensor& y);
  void reset_parameters() override;

  NormKind kind;
  double eps;
  at::Tensor weight;
  at::Tensor bias;  // undefined unless NormKind::Layer

 private:
  RmsNorm rms() const;
};
TESSERA_MODULE(Norm);

/// Data about positions, shared by all layers of a kind.
struct Positions {
  at::Tensor cos;  // [length, head_dim], or by row [batch, 1, length, head_dim]; undefined without rotary positions
  at::Tensor sin;
  at::Tensor mask;  // [length, tokens], or [batch, 1, length, tokens], added to scores; undefined: causal
  KeyValueCache* cache = nullptr;
};
inline auto tensor_fields(Positions& positions) {
  return std::tie(positions.cos, positions.sin, positions.mask);
}

struct AttentionImpl : torch::nn::Module {
  AttentionImpl(const DecoderConfig& config, int64_t number);
  at::Tensor forward(at::Tensor x, Positions positions);

  int64_t layer;  // index
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
  Mlp mlp{nullptr};  // null in a layer with experts
  Moe moe{nullptr};  // null unless config.is_sparse(layer); registered as mlp
};
TESSERA_MODULE(DecoderLayer);

/// Output layer that uses another module's parameter, which only that module registers.
struct TiedLinearImpl : torch::nn::Module {
  explicit TiedLinearImpl(at::Tensor weight) : weight(std::move(weight)) {}
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;
};
TESSERA_MODULE(TiedLinear);

/// Optional inputs of a decoder in addition to the ids.
struct DecoderInputs {
  /// [batch, length] of int64. A run of equal numbers in a row is a segment, such as a document or padding: its tokens
  /// attend only to each other, and their positions count from its start. Undefined: each row is one segment.
  at::Tensor segment_ids = {};
  /// Cache of earlier tokens, to which these are appended. Needs NoGradGuard. segment_ids require an empty cache; later
  /// tokens belong to each row's last segment.
  KeyValueCache* cache = nullptr;
  /// Number of last tokens in each row whose logits are returned; 0: all.
  int64_t logits_to_keep = 0;
  /// [batch, length] of int64. If defined, forward returns the next_token_loss of the logits and these labels, without
  /// materializing the logits (parallel/linear_cross_entropy.h). lm_head's own hooks then do not run.
  at::Tensor labels = {};
  std::optional<double> label_count = std::nullopt;  // `count` of next_token_loss
};
inline auto tensor_fields(DecoderInputs& inputs) {
  return std::tie(inputs.segment_ids, inputs.labels);
}

struct DecoderImpl : torch::nn::Module {
  /// Builds the model with random weights. Throws ValueError like check_config.
  explicit DecoderImpl(const DecoderConfig& given);
  /// Returns logits [batch, length, vocab_size] of the token after each of `ids` [batch, length], or the loss of
  /// inputs.labels. Throws ValueError for other dims, a cache that is too short and, with learned positions, a segment
  /// longer than config.max_position_embeddings.
  at::Tensor forward(const at::Tensor& ids, DecoderInputs inputs = {});

  DecoderConfig config;
  std::string source = {};  // folder from which from_pretrained loaded the model
  nn::Embedding embed_tokens{nullptr};
  nn::Embedding embed_positions{nullptr};  // null with rotary positions
  std::vector<DecoderLayer> layers;
  Norm norm{nullptr};
  nn::Linear lm_head{nullptr};       // null if tied
  TiedLinear tied_lm_head{nullptr};  // null unless tied; registered as lm_head too

 private:
  struct TokenPlaces;

  TokenPlaces find_places(const at::Tensor& ids, const DecoderInputs& inputs) const;
  at::Tensor logits_of(const at::Tensor& x);
  at::Tensor loss_of(const at::Tensor& x, const DecoderInputs& inputs);
  Positions make_positions(const RotaryConfig* rotary, bool slides, const TokenPlaces& places,
                           const at::TensorOptions& options) const;
};
TESSERA_MODULE(Decoder);

/// Returns router_aux_loss_coef times the load-balancing loss of the last forward. Add it once to that forward's loss.
/// Throws StateError without config.moe->output_router_logits or a forward.
at::Tensor router_aux_loss(Decoder& model);

/// Returns the mean of -log p of each next token, in float32. `labels` [batch, length] are usually the ids themselves;
/// -100 marks labels that do not count. `count` replaces the number of labels as the divisor. With the labels of all
/// ranks divided by the number of ranks, gradients averaged over ranks are those of the whole batch.
at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& labels,
                           std::optional<double> count = std::nullopt);

}  // namespace tessera::models
