#include "examples/gpt_model.h"

#include <ATen/core/Generator.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/utils.h>

#include <cmath>
#include <string>

#include "base/error.h"
#include "dtensor/random.h"
#include "fused/gelu.h"

namespace tessera::examples {

BlockImpl::BlockImpl(const GptConfig& config) : heads(config.heads) {
  const int64_t dim = config.dim;
  attention_norm = register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({dim})));
  qkv = register_module("qkv", nn::Linear(dim, 3 * dim));
  attention_out = register_module("attention_out", nn::Linear(dim, dim));
  mlp_norm = register_module("mlp_norm", nn::LayerNorm(nn::LayerNormOptions({dim})));
  mlp_in = register_module("mlp_in", nn::Linear(dim, 4 * dim));
  mlp_out = register_module("mlp_out", nn::Linear(4 * dim, dim));
}

at::Tensor BlockImpl::attend(const at::Tensor& x) {
  const int64_t batch = x.size(0);
  const int64_t time = x.size(1);
  const int64_t dim = x.size(2);
  // [batch, time, heads, 3, head dim] -> three of [batch, heads, time, head dim]. The heads come first, so that a shard
  // of the features has whole heads with their queries, keys and values.
  const auto parts = qkv(x).view({batch, time, heads, 3, dim / heads}).permute({3, 0, 2, 1, 4}).unbind(0);
  const at::Tensor attended =
      at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                       /*is_causal=*/true);
  return attention_out(attended.transpose(1, 2).reshape({batch, time, dim}));
}

at::Tensor BlockImpl::forward(at::Tensor x) {
  x = x + attend(attention_norm(x));
  return x + mlp_out(tanh_gelu(mlp_in(mlp_norm(x))));
}

GptImpl::GptImpl(const GptConfig& given, uint64_t seed) : config(given) {
  TESSERA_CHECK(ValueError, config.dim > 0 && config.heads > 0 && config.dim % config.heads == 0,
                "GptConfig: dim {}, heads {}; both must be above 0, and heads divide dim", config.dim, config.heads);
  token_embedding = register_module("token_embedding", nn::Embedding(kByteValues, config.dim));
  position_embedding = register_module("position_embedding", nn::Embedding(config.context, config.dim));
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks.push_back(register_module("block" + std::to_string(i), Block(config)));
  }
  norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({config.dim})));
  output = register_module("output", nn::Linear(nn::LinearOptions(config.dim, kByteValues).bias(false)));
  initialize(seed);
}

// Like GPT-2 (0.02 is 0.55 / sqrt(768)), and narrower for the 2 x layers matrices that add to the residual stream.
void GptImpl::initialize(uint64_t seed) {
  const torch::NoGradGuard no_grad;
  const at::Generator generator = new_generator(parameters().front().device(), seed);
  const double std = 0.55 / std::sqrt(static_cast<double>(config.dim));
  const double residual_std = std / std::sqrt(2.0 * static_cast<double>(config.layers));
  for (auto& item : named_parameters()) {
    const std::string& name = item.key();
    if (item.value().dim() == 2) {
      const bool adds_to_residual = name.ends_with("attention_out.weight") || name.ends_with("mlp_out.weight");
      item.value().normal_(0.0, adds_to_residual ? residual_std : std, generator);
    } else if (name.ends_with("bias")) {
      item.value().zero_();
    } else {
      item.value().fill_(1);  // weights of norms
    }
  }
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) {
  const at::Tensor positions = at::arange(tokens.size(1), tokens.options());
  at::Tensor x = token_embedding(tokens) + position_embedding(positions);
  for (auto& block : blocks) {
    x = block(x);
  }
  return output(norm(x));
}

int64_t parameter_count(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const auto& parameter : module.parameters()) {
    count += parameter.numel();
  }
  return count;
}

at::Tensor next_byte_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.reshape({-1, kByteValues}).to(at::kFloat), targets.reshape({-1}));
}

}  // namespace tessera::examples
