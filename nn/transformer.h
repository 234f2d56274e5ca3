#pragma once
// torch::nn's attention and transformer layers with a hook point: same constructors and members, and the results of
// PyTorch's Python, masks included (nn/hooks/python_forward.h).
//
// The layers of an encoder or a decoder have one each, so that they can be units of fully_shard, be checkpointed, and
// so on; those of a stock one are stock, and called by it in a way that no hook sees. What is inside of a layer (its
// attention, its linear layers) is stock.
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

/// Its `layers` are tessera::nn::TransformerEncoderLayers.
class TransformerEncoderImpl : public torch::nn::TransformerEncoderImpl {
 public:
  TransformerEncoderImpl(torch::nn::TransformerEncoderLayer layer, int64_t num_layers);
  explicit TransformerEncoderImpl(TransformerEncoderOptions options);
  /// Shares parameters, buffers and what is inside of layers with `stock`.
  explicit TransformerEncoderImpl(const torch::nn::TransformerEncoderImpl& stock);

  at::Tensor forward(const at::Tensor& src, const at::Tensor& src_mask = {},
                     const at::Tensor& src_key_padding_mask = {});
  void reset() override;
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;

 private:
  void hook_layers();
};
TESSERA_MODULE(TransformerEncoder);

/// Its `layers` are tessera::nn::TransformerDecoderLayers.
class TransformerDecoderImpl : public torch::nn::TransformerDecoderImpl {
 public:
  TransformerDecoderImpl(torch::nn::TransformerDecoderLayer layer, int64_t num_layers);
  explicit TransformerDecoderImpl(TransformerDecoderOptions options);
  /// As of the encoder.
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

/// Its `encoder` holds a tessera::nn::TransformerEncoder and its `decoder` a tessera::nn::TransformerDecoder, where the
/// options give none of one's own.
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
