#pragma once
// A term added to the product of a tessera::nn::Linear, as low-rank adaptation does (nn/lora_adapter.h).
//
//   linear->attach<LinearAdapter>(std::make_shared<MyAdapter>());  // of every call from now on
//   linear->detach<LinearAdapter>();
//
// It runs inside of the layer's hooks and of a wrapper, whenever they are registered: tensor-parallel styles place its
// input, and then the sum.

#include <ATen/core/Tensor.h>

namespace tessera {

/// Thread safety: several threads may call it.
class LinearAdapter {
 public:
  virtual ~LinearAdapter() = default;
  /// Returns the sum of `output`, the layer's product of `input`, and the term.
  virtual at::Tensor add_to(const at::Tensor& output, const at::Tensor& input) const = 0;
};

}  // namespace tessera
