#pragma once
// torch::nn's attention and transformer layers with a hook point, and the same constructors and members. Results equal
// those of PyTorch's Python, masks included (nn/hooks/python_forward.h).
//
// Each layer of an encoder or decoder has a hook point too, so it can be a unit of fully_shard or be checkpointed. (A
// stock encoder calls its layers without running hooks.) Modules inside a layer, such as its attention, are stock.
//
//   tessera::nn::TransformerEncoder encoder(TransformerEncoderOptions(torch::nn::TransformerEncoderLayer(64, 4), 6));
//   for (const auto& layer : *encoder->layers) {
//     fully_shard(layer);
//   }
//   fully_shard(encoder);

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include <memory>
#include <optional>

#include "nn/hooks/hooked.h"

namespace tessera::nn {

using torch::nn::MultiheadAttentionOptions;
using torch::nn::TransformerDecoderLayerOptions;
using torch::nn::TransformerDecoderOptions;
using torch::nn::TransformerEncoderLayerOptions;
using torch::nn::TransformerEncoderOptions;
using torch::nn::TransformerOptions;

TESSERA_MODULE_IMPL(MultiheadAttention, torch::nn::MultiheadAttentionImpl);
TESSERA_MODULE_IMPL(TransformerDecoderLayer, torch::nn::TransformerDecoderLayerImpl);
TESSERA_MODULE_IMPL(TransformerEncoderLayer, torch::nn::TransformerEncoderLayerImpl);

/// Holds tessera::nn::TransformerEncoderLayers in `layers`.
class TransformerEncoderImpl : public torch::nn::TransformerEncoderImpl {
 public:
  TransformerEncoderImpl(torch::nn::TransformerEncoderLayer layer, int64_t num_layers);
  explicit TransformerEncoderImpl(TransformerEncoderOptions options);
  /// Shares parameters, buffers and the modules inside layers with `stock`.
  explicit TransformerEncoderImpl(const torch::nn::TransformerEncoderImpl& stock);

  at::Tensor forward(const at::Tensor& src, const at::Tensor& src_mask = {},
                     const at::Tensor& src_key_padding_mask = {});
  void reset() override;
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;

 private:
  void hook_layers();
};
TESSERA_MODULE(TransformerEncoder);

/// Holds tessera::nn::TransformerDecoderLayers in `layers`.
class TransformerDecoderImpl : public torch::nn::TransformerDecoderImpl {
 public:
  TransformerDecoderImpl(torch::nn::TransformerDecoderLayer layer, int64_t num_layers);
  explicit TransformerDecoderImpl(TransformerDecoderOptions options);
  /// Shares parameters, buffers and the modules inside layers with `stock`.
  explicit TransformerDecoderImpl(const torch::nn::TransformerDecoderImpl& stock);

  at::Tensor forward(const at::Tensor& tgt, const at::Tensor& memory, const at::Tensor& tgt_mask = {},
                     const at::Tensor& memory_mask = {}, const at::Tensor& tgt_key_padding_mask = {},
                     const at::Tensor& memory_key_padding_mask = {});
  void reset() override;
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;

 private:
  void hook_layers();
};
TESSERA_MODULE(TransformerDecoder);

/// Holds a tessera::nn::TransformerEncoder and TransformerDecoder, unless the options provide custom ones.
class TransformerImpl : public torch::nn::TransformerImpl {
 public:
  TransformerImpl(int64_t d_model, int64_t nhead);
  explicit TransformerImpl(TransformerOptions options);
  explicit TransformerImpl(const torch::nn::TransformerImpl& stock);

  void reset() override;
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;

 private:
  void hook_coders();
};
TESSERA_MODULE(Transformer);

}  // namespace tessera::nn
