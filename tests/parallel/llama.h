#pragma once
// A small language model of the LLaMA kind: RMSNorm, rotary positions, grouped-query attention, SwiGLU. It is written
// for plain tensors and for DTensors alike; llama_plan() cuts it.

#include <torch/nn/module.h>

#include <vector>

#include "nn/embedding.h"
#include "nn/hooks/hooked.h"
#include "nn/linear.h"
#include "nn/rms_norm.h"
#include "parallel/parallel_style.h"

namespace tessera::testing {

struct LlamaConfig {
  int64_t vocabulary = 19;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t head_dim = 4;
  int64_t hidden = 17;
  int64_t layers = 2;

  int64_t dim() const { return heads * head_dim; }
};

/// Cosines and sines of the angles of each position: [2, length, head_dim / 2].
at::Tensor rotary_table(int64_t length, int64_t head_dim);

/// Heads that divide by the ranks stay where a column-wise layer computes them. Others do not: a cut of
/// heads * head_dim features then goes through a head, so the view gathers the features, and each rank takes its heads
/// of them again; ranks beyond the number of heads have none.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x, const at::Tensor& rotary);

  LlamaConfig config;
  tessera::nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};
};
TESSERA_MODULE(Attention);

/// w2(silu(w1(x)) * w3(x))
struct SwiGluImpl : torch::nn::Module {
  explicit SwiGluImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x);

  tessera::nn::Linear w1{nullptr}, w2{nullptr}, w3{nullptr};
};
TESSERA_MODULE(SwiGlu);

struct LlamaBlockImpl : torch::nn::Module {
  explicit LlamaBlockImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x, const at::Tensor& rotary);

  tessera::nn::RMSNorm attention_norm{nullptr}, ffn_norm{nullptr};
  Attention attention{nullptr};
  SwiGlu ffn{nullptr};
};
TESSERA_MODULE(LlamaBlock);

/// Tokens [batch, length] → logits [batch, length, vocabulary].
struct LlamaImpl : torch::nn::Module {
  explicit LlamaImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& tokens);

  LlamaConfig config;
  tessera::nn::Embedding embed{nullptr};
  std::vector<LlamaBlock> blocks;
  tessera::nn::RMSNorm norm{nullptr};
  tessera::nn::Linear output{nullptr};
};
TESSERA_MODULE(Llama);

/// Vocabulary-parallel embedding and output, tensor-parallel layers, and shards of the sequence between them. Logits
/// come as a DTensor cut along the vocabulary.
ParallelPlan llama_plan();

/// A model in float64 with the same parameters at each call.
Llama make_llama(const LlamaConfig& config, c10::Device device = c10::kCPU);
/// Two sequences of words of the vocabulary.
at::Tensor make_tokens(uint64_t seed, int64_t length, c10::Device device = c10::kCPU);
/// Cross-entropy of logits, plain or cut along the vocabulary, with labels that are the same at each call.
at::Tensor token_loss(const at::Tensor& logits);

}  // namespace tessera::testing
