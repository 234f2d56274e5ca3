#pragma once
// torch::nn's embedding layers with a hook point, and with the same constructors, members and results.

#include <torch/nn/modules/embedding.h>

#include "nn/hooks/hooked.h"

namespace tessera::nn {

using torch::nn::EmbeddingBagFromPretrainedOptions;
using torch::nn::EmbeddingBagOptions;
using torch::nn::EmbeddingFromPretrainedOptions;
using torch::nn::EmbeddingOptions;

/// Holder with torch::nn::Embedding's from_pretrained.
class Embedding : public HookedHolder<Hooked<torch::nn::EmbeddingImpl>> {
 public:
  using HookedHolder::HookedHolder;
  using Impl = Hooked<torch::nn::EmbeddingImpl>;
  Embedding() = default;
  Embedding(HookedHolder other)  // NOLINT(google-explicit-constructor): converts like torch's holders
      : HookedHolder(std::move(other)) {}

  static Embedding from_pretrained(const at::Tensor& embeddings, const EmbeddingFromPretrainedOptions& options = {}) {
    return hooked(torch::nn::Embedding::from_pretrained(embeddings, options));
  }
};

class EmbeddingBag : public HookedHolder<Hooked<torch::nn::EmbeddingBagImpl>> {
 public:
  using HookedHolder::HookedHolder;
  using Impl = Hooked<torch::nn::EmbeddingBagImpl>;
  EmbeddingBag() = default;
  EmbeddingBag(HookedHolder other)  // NOLINT(google-explicit-constructor): converts like torch's holders
      : HookedHolder(std::move(other)) {}

  static EmbeddingBag from_pretrained(const at::Tensor& embeddings,
                                      const EmbeddingBagFromPretrainedOptions& options = {}) {
    return hooked(torch::nn::EmbeddingBag::from_pretrained(embeddings, options));
  }
};

}  // namespace tessera::nn
