#include "testing/fsdp_models/transformer_with_shared_params.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include "nn/hooks/clone.h"

namespace tessera::testing {

namespace {

using tessera::nn::Linear;
using tessera::nn::TransformerDecoderLayer;
using tessera::nn::TransformerEncoderLayer;

constexpr int64_t kVocabulary = 23;
constexpr int64_t kWidth = 16;
constexpr int64_t kHeads = 8;
constexpr int64_t kFeedForward = 8;
constexpr int64_t kBatch = 2;
constexpr int kLayers = 2;

tessera::nn::LayerNorm make_norm() {
  return tessera::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}));
}

/// Draws like a Linear layer that is made and then copied; only the copies' bias values stay.
at::Tensor draw_linear(int64_t in, int64_t out) {
  const Linear layer(in, out);
  return layer->bias.detach();
}

void draw_attention() {
  draw_linear(kWidth, kWidth);
  torch::nn::init::xavier_uniform_(at::empty({3 * kWidth, kWidth}));
}

struct FeedForwardBiases {
  at::Tensor first, second;
};

FeedForwardBiases draw_feed_forward() {
  auto first = draw_linear(kWidth, kFeedForward);
  auto second = draw_linear(kFeedForward, kWidth);
  return {std::move(first), std::move(second)};
}

/// Draws like Python, which makes one encoder and one decoder layer, copies them, and then redraws all matrices.
void draw_as_python(EncoderDecoderImpl& transformer) {
  const at::NoGradGuard no_grad;
  draw_attention();
  const auto encoder = draw_feed_forward();
  draw_attention();
  draw_attention();
  const auto decoder = draw_feed_forward();
  for (const auto& layer : *transformer.encoder->layers) {
    auto& own = dynamic_cast<torch::nn::TransformerEncoderLayerImpl&>(*layer);
    own.linear1->bias.copy_(encoder.first);
    own.linear2->bias.copy_(encoder.second);
  }
  for (const auto& layer : *transformer.decoder->layers) {
    auto& own = dynamic_cast<torch::nn::TransformerDecoderLayerImpl&>(*layer);
    own.linear1->bias.copy_(decoder.first);
    own.linear2->bias.copy_(decoder.second);
  }
  const auto draw_matrices = [](torch::nn::MultiheadAttentionImpl& attention) {
    torch::nn::init::xavier_uniform_(attention.in_proj_weight);
    torch::nn::init::xavier_uniform_(attention.out_proj->weight);
  };
  for (const auto& layer : *transformer.encoder->layers) {
    auto& own = dynamic_cast<torch::nn::TransformerEncoderLayerImpl&>(*layer);
    draw_matrices(*own.self_attn);
    torch::nn::init::xavier_uniform_(own.linear1->weight);
    torch::nn::init::xavier_uniform_(own.linear2->weight);
  }
  for (const auto& layer : *transformer.decoder->layers) {
    auto& own = dynamic_cast<torch::nn::TransformerDecoderLayerImpl&>(*layer);
    draw_matrices(*own.self_attn);
    draw_matrices(*own.multihead_attn);
    torch::nn::init::xavier_uniform_(own.linear1->weight);
    torch::nn::init::xavier_uniform_(own.linear2->weight);
  }
}

void wrap_layers(TransformerWithSharedParamsImpl& model, const InitOptions& options) {
  for (const auto& layer : *model.transformer->encoder->layers) {
    wrap_unit(*layer, options);
  }
  for (const auto& layer : *model.transformer->decoder->layers) {
    wrap_unit(*layer, options);
  }
}

}  // namespace

EncoderStackImpl::EncoderStackImpl() {
  register_module("layers", layers);
  for (int i = 0; i < kLayers; ++i) {
    layers->push_back(TransformerEncoderLayer(
        torch::nn::TransformerEncoderLayerOptions(kWidth, kHeads).dim_feedforward(kFeedForward).dropout(0.1)));
  }
  norm = register_module("norm", make_norm());
}

at::Tensor EncoderStackImpl::forward(at::Tensor src) {
  for (const auto& layer : *layers) {
    src = layer->as<TransformerEncoderLayer>()->call(src);
  }
  return norm(src);
}

DecoderStackImpl::DecoderStackImpl() {
  register_module("layers", layers);
  for (int i = 0; i < kLayers; ++i) {
    layers->push_back(TransformerDecoderLayer(
        torch::nn::TransformerDecoderLayerOptions(kWidth, kHeads).dim_feedforward(kFeedForward).dropout(0.1)));
  }
  norm = register_module("norm", make_norm());
}

at::Tensor DecoderStackImpl::forward(at::Tensor tgt, at::Tensor memory) {
  for (const auto& layer : *layers) {
    tgt = layer->as<TransformerDecoderLayer>()->call(tgt, memory);
  }
  return norm(tgt);
}

EncoderDecoderImpl::EncoderDecoderImpl() {
  encoder = register_module("encoder", EncoderStack());
  decoder = register_module("decoder", DecoderStack());
}

at::Tensor EncoderDecoderImpl::forward(at::Tensor src, at::Tensor tgt) {
  return decoder(tgt, encoder(src));
}

TransformerWithSharedParamsImpl::TransformerWithSharedParamsImpl(const InitOptions& options) {
  const BuildScope build(options.deterministic ? std::optional<uint64_t>(0) : std::nullopt);
  embed_tokens = register_module("embed_tokens", tessera::nn::Embedding(kVocabulary, kWidth));
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const auto before = generator.get_state();
  transformer = register_module("transformer", EncoderDecoder());
  generator.set_state(before);
  draw_as_python(*transformer);
  output_proj = register_module("output_proj", Linear(kWidth, kVocabulary));
  tie_parameter(*output_proj, "weight", embed_tokens->weight);
  vocab_bias = register_buffer("vocab_bias", at::ones({kWidth}));
  long_buffer = register_buffer("long_buffer", at::zeros({kWidth}, at::kLong));
  if (options.add_bn) {
    bn = register_module("bn", tessera::nn::BatchNorm1d(kBatch));
  } else {
    register_module("bn", tessera::nn::Identity());
  }
  if (options.deterministic) {
    eval();
  }
}

std::vector<at::Tensor> TransformerWithSharedParamsImpl::get_input(at::Device device) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  return {at::arange(12, options).view({6, kBatch}), at::arange(8, options).view({4, kBatch})};
}

at::Tensor TransformerWithSharedParamsImpl::forward(std::vector<at::Tensor> inputs) {
  auto src = embed_tokens(inputs.at(0));
  src = src + vocab_bias + long_buffer.to(src.scalar_type());
  auto tgt = embed_tokens(inputs.at(1));
  if (bn) {
    tgt = bn(tgt);
  }
  return output_proj(transformer(src, tgt));
}

at::Tensor TransformerWithSharedParamsImpl::get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) {
  return at::cross_entropy_loss(output.view({-1, output.size(-1)}), input.at(1).view({-1}), {}, at::Reduction::Sum);
}

const ModelClass& transformer_with_shared_params() {
  static const ModelClass model{"TransformerWithSharedParams", [](const InitOptions& options) {
                                  TransformerWithSharedParams model(options);
                                  return finish_init(model.ptr(), options, [&] {
                                    wrap_layers(*model, options);
                                    wrap_unit(*model, options);
                                  });
                                }};
  return model;
}

}  // namespace tessera::testing
