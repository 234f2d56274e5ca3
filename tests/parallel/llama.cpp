#include "tests/parallel/llama.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>
#include <torch/nn/modules/container/modulelist.h>

#include "parallel/linear_styles.h"
#include "parallel/prepare_module.h"
#include "parallel/sequence_parallel.h"
#include "testing/run_ranks.h"
#include "tests/parallel/tp_models.h"

namespace tessera::testing {

namespace {

tessera::nn::Linear linear_without_bias(int64_t in, int64_t out) {
  return tessera::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

/// [batch, length, heads * head_dim] → [batch, length, heads, head_dim]; a DTensor is cut by heads.
at::Tensor by_heads(const at::Tensor& x, int64_t heads) {
  const auto split = x.view({x.size(0), x.size(1), heads, x.size(2) / heads});
  return is_dtensor(split) ? redistribute(split, {Shard(2)}) : split;
}

/// Turns each pair of features (i, i + half) by its position's angle.
at::Tensor rotated(const at::Tensor& x, const at::Tensor& rotary) {
  const int64_t half = x.size(3) / 2;
  const auto cosine = rotary.select(0, 0).unsqueeze(1);
  const auto sine = rotary.select(0, 1).unsqueeze(1);
  const auto first = x.narrow(3, 0, half), second = x.narrow(3, half, half);
  return at::cat({first * cosine - second * sine, first * sine + second * cosine}, 3);
}

/// Each head for `times` query heads: [batch, length, heads, head_dim] → [batch, length, heads * times, head_dim].
at::Tensor repeated(const at::Tensor& x, int64_t times) {
  const int64_t heads = x.size(2);
  const auto wide = x.unsqueeze(3).expand({x.size(0), x.size(1), heads, times, x.size(3)});
  const auto flat = wide.reshape({x.size(0), x.size(1), heads * times, x.size(3)});
  return is_dtensor(flat) ? redistribute(flat, {Shard(2)}) : flat;
}

}  // namespace

at::Tensor rotary_table(int64_t length, int64_t head_dim) {
  const auto rates = at::pow(100.0, at::arange(0, head_dim, 2, at::kDouble) / -static_cast<double>(head_dim));
  const auto angles = at::arange(length, at::kDouble).unsqueeze(1) * rates;
  return at::stack({angles.cos(), angles.sin()});
}

AttentionImpl::AttentionImpl(const LlamaConfig& config) : config(config) {
  wq = register_module("wq", linear_without_bias(config.dim(), config.dim()));
  wk = register_module("wk", linear_without_bias(config.dim(), config.kv_heads * config.head_dim));
  wv = register_module("wv", linear_without_bias(config.dim(), config.kv_heads * config.head_dim));
  wo = register_module("wo", linear_without_bias(config.dim(), config.dim()));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x, const at::Tensor& rotary) {
  const int64_t group = config.heads / config.kv_heads;
  const auto query = rotated(by_heads(wq(x), config.heads), rotary);
  const auto key = repeated(rotated(by_heads(wk(x), config.kv_heads), rotary), group);
  const auto value = repeated(by_heads(wv(x), config.kv_heads), group);
  const auto mixed = at::scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
                                                      {}, 0.0, /*is_causal=*/true);
  return wo(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), config.dim()}));
}

SwiGluImpl::SwiGluImpl(const LlamaConfig& config) {
  w1 = register_module("w1", linear_without_bias(config.dim(), config.hidden));
  w2 = register_module("w2", linear_without_bias(config.hidden, config.dim()));
  w3 = register_module("w3", linear_without_bias(config.dim(), config.hidden));
}

at::Tensor SwiGluImpl::forward(const at::Tensor& x) {
  return w2(at::silu(w1(x)) * w3(x));
}

LlamaBlockImpl::LlamaBlockImpl(const LlamaConfig& config) {
  attention_norm = register_module("attention_norm", tessera::nn::RMSNorm(config.dim()));
  attention = register_module("attention", Attention(config));
  ffn_norm = register_module("ffn_norm", tessera::nn::RMSNorm(config.dim()));
  ffn = register_module("ffn", SwiGlu(config));
}

at::Tensor LlamaBlockImpl::forward(const at::Tensor& x, const at::Tensor& rotary) {
  const auto attended = x + attention(attention_norm(x), rotary);
  return attended + ffn(ffn_norm(attended));
}

LlamaImpl::LlamaImpl(const LlamaConfig& config) : config(config) {
  embed = register_module("embed", tessera::nn::Embedding(config.vocabulary, config.dim()));
  auto layers = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks.emplace_back(config);
    layers->push_back(blocks.back());
  }
  norm = register_module("norm", tessera::nn::RMSNorm(config.dim()));
  output = register_module("output", linear_without_bias(config.dim(), config.vocabulary));
}

at::Tensor LlamaImpl::forward(const at::Tensor& tokens) {
  const auto rotary = rotary_table(tokens.size(1), config.head_dim).to(tokens.device());
  auto x = embed(tokens);
  for (auto& block : blocks) {
    x = block(x, rotary);
  }
  return output(norm(x));
}

ParallelPlan llama_plan() {
  const ColwiseParallel columns;
  const RowwiseParallel rows({.output_layouts = Shard(1), .use_local_output = false});
  return {
      {"embed", rows},
      {"layers.*.*_norm", SequenceParallel()},
      {"layers.*.attention", PrepareModuleInput({.input_layouts = {Shard(1), Replicate()},
                                                 .desired_input_layouts = {Replicate(), Replicate()}})},
      {"layers.*.attention.w[qkv]", columns},
      {"layers.*.attention.wo", rows},
      {"layers.*.ffn", PrepareModuleInput({.input_layouts = {Shard(1)}, .desired_input_layouts = {Replicate()}})},
      {"layers.*.ffn.w[13]", columns},
      {"layers.*.ffn.w2", rows},
      {"norm", SequenceParallel()},
      {"output", columns},
  };
}

Llama make_llama(const LlamaConfig& config, c10::Device device) {
  Llama model(config);
  fill_in_double(*model, 12);
  model->to(device);
  return model;
}

at::Tensor make_tokens(uint64_t seed, int64_t length, c10::Device device) {
  return at::randint(LlamaConfig().vocabulary, {2, length}, make_generator(seed), at::kLong).to(device);
}

at::Tensor token_loss(const at::Tensor& logits) {
  const auto labels = make_tokens(5, logits.size(1), logits.device());
  const auto targets = is_dtensor(logits) ? distribute_tensor(labels, device_mesh(logits), {Replicate()}) : labels;
  return at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

}  // namespace tessera::testing
