#pragma once
// A decoder-only transformer over bytes, written as any libtorch module is: nothing in it knows about sharding.
// The only difference to a stock model is TESSERA_MODULE and tessera::nn in place of TORCH_MODULE and torch::nn,
// which give the modules the hook points that fully_shard needs.
//
//   Gpt model(GptConfig{.dim = 64, .layers = 2, .heads = 4, .context = 32}, /*seed=*/1);
//   at::Tensor logits = model(tokens);        // tokens [batch, time] int64 -> logits [batch, time, 256]
//
// Layers and initial values are GPT-2's (pre-norm blocks, learned positions, GELU), save that the token embedding and
// the output layer have weights of their own.

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
  /// The most bytes that the model looks at.
  int64_t context = 128;
};

/// x + attention(norm(x)), then x + mlp(norm(x)); x is [batch, time, dim].
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
  /// On the CPU. The same config and seed give the same parameters in every process. Throws ValueError unless
  /// config.heads divides config.dim.
  GptImpl(const GptConfig& config, uint64_t seed);
  /// Logits of the byte that follows each of `tokens`; at most config.context of them.
  at::Tensor forward(const at::Tensor& tokens);
  /// What the constructor gives the parameters; also after lay_out, where each rank keeps its parts of the same values.
  /// They are drawn on the parameters' device, and another kind of device draws other ones.
  void initialize(uint64_t seed);

  GptConfig config;
  nn::Embedding token_embedding{nullptr};
  nn::Embedding position_embedding{nullptr};
  std::vector<Block> blocks;
  nn::LayerNorm norm{nullptr};
  nn::Linear output{nullptr};
};
TESSERA_MODULE(Gpt);

/// The number of scalars in all parameters.
int64_t parameter_count(const torch::nn::Module& module);

/// Mean over all positions of -log p(target), in nats; logits [batch, time, 256] of any dtype, targets [batch, time].
at::Tensor next_byte_loss(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace tessera::examples
