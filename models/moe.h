#pragma once
// Mixture of experts: a router sends each token to some of many MLPs and combines their results by its weights.
//
// Experts' matrices are stacked, [experts, out, in], and tokens are sorted by expert, so that each expert with tokens
// runs one multiplication. Under fully_shard and tensor parallelism, a rank has a part of every expert; with
// ExpertParallel it has some whole experts (decoder_layout.h).
//
// Thread safety: like a torch::nn::Module.
// Sources: A. Jiang et al., Mixtral of Experts, 2024; W. Fedus et al., Switch Transformers, 2021 (the loss).

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <vector>

#include "models/decoder_config.h"
#include "nn/hooked.h"
#include "nn/reset_parameters.h"

namespace tessera::models {

/// Applies the activation elementwise.
at::Tensor activate(const at::Tensor& x, Activation activation);

/// Returns activate(gate) * up.
at::Tensor activate_gate(const at::Tensor& gate, const at::Tensor& up, Activation activation);

/// Computes each token's logits over the experts.
struct RouterImpl : torch::nn::Module, ResettableParameters {
  explicit RouterImpl(const DecoderConfig& config);
  at::Tensor forward(const at::Tensor& tokens);
  void reset_parameters() override;

  at::Tensor weight;  // [experts, hidden_size]
};
TESSERA_MODULE(Router);

/// Computes down(activation(gate(x)) * up(x)) with each token's expert.
struct ExpertsImpl : torch::nn::Module, ResettableParameters {
  explicit ExpertsImpl(const DecoderConfig& config);
  /// Takes tokens [n, hidden_size] sorted by expert, and the number of tokens per expert, as ExpertParallel passes
  /// them.
  at::Tensor forward(at::Tensor tokens, at::Tensor counts);
  void reset_parameters() override;

  Activation activation;
  at::Tensor gate_proj, up_proj;  // [experts, intermediate_size, hidden_size]
  at::Tensor down_proj;           // [experts, hidden_size, intermediate_size]
};
TESSERA_MODULE(Experts);

/// Routes each token to the experts with the largest probabilities, computed in float32.
struct MoeImpl : torch::nn::Module {
  explicit MoeImpl(const DecoderConfig& config);
  /// A DTensor must be replicated, with parts of the experts, or sharded by tokens, with whole experts. The result is
  /// Partial, or sharded in the same way.
  at::Tensor forward(at::Tensor x);

  MoeConfig config;
  Router router{nullptr};
  Experts experts{nullptr};
  at::Tensor router_logits;  // [tokens, experts] of the last forward; undefined unless config.output_router_logits

 private:
  at::Tensor mix(const at::Tensor& tokens, const at::Tensor& logits);
};
TESSERA_MODULE(Moe);

/// Returns the load-balancing loss of the layers' router logits [tokens, experts], over all tokens together. It is
/// num_experts_per_tok if all experts are used equally, and larger otherwise.
at::Tensor load_balancing_loss(const std::vector<at::Tensor>& router_logits, int64_t num_experts_per_tok);

}  // namespace tessera::models
