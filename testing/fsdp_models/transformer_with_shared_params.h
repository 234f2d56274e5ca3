#pragma once
// A small transformer whose output projection shares its weight with the embedding. It has 2 encoder and 2 decoder
// layers of width 16 and 8 heads, over a vocabulary of 23. It has 68 parameters of 8,427 elements, or 66 of 8,423
// without batch norm.
//
// The layers have hook points (those inside a stock torch::nn::Transformer do not), and are drawn in the order of
// Python's nn.Transformer rather than libtorch's, so the deterministic model is Python's. All ranks have the same
// input, so this model does not test averages over ranks. The source's seed in get_input affects only later draws
// (dropout), and is omitted, since ranks that are threads share the generator.
// Source: torch/testing/_internal/common_fsdp.py.

#include <string>

#include "nn/embedding.h"
#include "nn/hooks/hooked.h"
#include "nn/linear.h"
#include "nn/normalization.h"
#include "nn/transformer.h"
#include "testing/fsdp_models/test_model.h"

namespace tessera::testing {

/// Two encoder layers, followed by a norm.
struct EncoderStackImpl : torch::nn::Module {
  EncoderStackImpl();
  at::Tensor forward(at::Tensor src);

  torch::nn::ModuleList layers;
  tessera::nn::LayerNorm norm{nullptr};
};
TESSERA_MODULE(EncoderStack);

struct DecoderStackImpl : torch::nn::Module {
  DecoderStackImpl();
  at::Tensor forward(at::Tensor tgt, at::Tensor memory);

  torch::nn::ModuleList layers;
  tessera::nn::LayerNorm norm{nullptr};
};
TESSERA_MODULE(DecoderStack);

struct EncoderDecoderImpl : torch::nn::Module {
  EncoderDecoderImpl();
  at::Tensor forward(at::Tensor src, at::Tensor tgt);

  EncoderStack encoder{nullptr};
  DecoderStack decoder{nullptr};
};
TESSERA_MODULE(EncoderDecoder);

class TransformerWithSharedParamsImpl : public FSDPTestModel {
 public:
  explicit TransformerWithSharedParamsImpl(const InitOptions& options);

  std::vector<at::Tensor> get_input(at::Device device) override;
  at::Tensor forward(std::vector<at::Tensor> inputs) override;
  at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) override;
  /// Runs only the transformer.
  std::vector<torch::nn::Module*> get_ignored_modules() const { return {transformer.ptr().get()}; }

  tessera::nn::Embedding embed_tokens{nullptr};
  EncoderDecoder transformer{nullptr};
  tessera::nn::Linear output_proj{nullptr};
  tessera::nn::BatchNorm1d bn{nullptr};  // null without batch norm
  at::Tensor vocab_bias, long_buffer;
};
TESSERA_MODULE(TransformerWithSharedParams);

/// RECURSIVE makes every encoder and decoder layer a unit, then the whole model.
const ModelClass& transformer_with_shared_params();

}  // namespace tessera::testing
