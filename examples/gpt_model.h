#pragma once
// A decoder-only transformer over bytes, written like any libtorch module, without sharding. The only difference is
// TESSERA_MODULE and tessera::nn instead of TORCH_MODULE and torch::nn, for the hook points that fully_shard needs.
//
//   Gpt model(GptConfig{.dim = 64, .layers = 2, .heads = 4, .context = 32}, /*seed=*/1);
//   at::Tensor logits = model(tokens);        // tokens [batch, time] int64 -> logits [batch, time, 256]
//
// Layers and initial values are GPT-2's (pre-norm blocks, learned positions, GELU), except that the token embedding and
// the output layer have separate weights.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <vector>

#include "nn/embedding.h"
#include "nn/hooked.h"
#include "nn/linear.h"
#include "nn/normalization.h"

namespace tessera::examples {

constexpr int64_t kByteValues = 256;

struct GptConfig {
  int64_t dim = 128;
  int64_t layers = 4;
  /// Must divide dim.
  int64_t heads = 4;
  /// Maximum number of bytes that the model sees.
  int64_t context = 128;
};

/// Computes x + attention(norm(x)), then x + mlp(norm(x)); x is [batch, time, dim].
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptConfig& config);
  at::Tensor forward(at::Tensor x);

  int64_t heads;
  nn::LayerNorm attention_norm{nullptr};
  nn::Linear qkv{nullptr};
  nn::Linear attention_out{nullptr};
  nn::LayerNorm mlp_norm{nullptr};
  nn::Linear mlp_in{nullptr};
  nn::Linear mlp_out{nullptr};

 private:
  at::Tensor attend(const at::Tensor& x);
};
TESSERA_MODULE(Block);

struct GptImpl : torch::nn::Module {
  /// Builds the model on the CPU. Parameters are equal in every process for the same config and seed. Throws ValueError
  /// unless config.heads divides config.dim.
  GptImpl(const GptConfig& config, uint64_t seed);
  /// Returns logits of the byte after each of `tokens`, which has at most config.context bytes.
  at::Tensor forward(const at::Tensor& tokens);
  /// Sets the constructor's initial values, also after lay_out, where each rank keeps its shards of them. They are
  /// drawn on the parameters' device; other types of device draw others.
  void initialize(uint64_t seed);

  GptConfig config;
  nn::Embedding token_embedding{nullptr};
  nn::Embedding position_embedding{nullptr};
  std::vector<Block> blocks;
  nn::LayerNorm norm{nullptr};
  nn::Linear output{nullptr};
};
TESSERA_MODULE(Gpt);

/// Returns the number of scalars in all parameters.
int64_t parameter_count(const torch::nn::Module& module);

/// Returns the mean of -log p(target) over all positions, in nats. Logits are [batch, time, 256] of any dtype, and
/// targets [batch, time].
at::Tensor next_byte_loss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace tessera::examples
