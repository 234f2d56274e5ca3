#pragma once
// Low-rank adaptation of a Linear: y = W x + b + scaling * B(A(x)), with A [r, in] and B [out, r] (E. Hu et al., LoRA,
// 2021). lora/lora.h adds adapters to a model; this header has the parts that tensor-parallel styles and files need.
//
// The matrices are children of the Linear, with the names of Hugging Face's PEFT: q_proj.lora_A.weight,
// q_proj.lora_B.weight. The adapter is attached to the Linear's hook point, which must be destroyed before the module.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>

#include "nn/hooks/linear_adapter.h"
#include "nn/reset_parameters.h"

namespace tessera::nn {

enum class LoraInit { Random, Zeros };  // Random: like a Linear's weight

/// Matrix of an adapter. It has no forward: the adapter reads its weight.
struct LoraMatrixImpl : torch::nn::Module, ResettableParameters {
  LoraMatrixImpl(int64_t rows, int64_t columns, LoraInit init, const at::TensorOptions& options);
  void reset_parameters() override;

  at::Tensor weight;
  LoraInit init;
};
TORCH_MODULE(LoraMatrix);

struct LoraScale {
  int64_t r = 8;
  double lora_alpha = 8;
  bool use_rslora = false;  // divide by sqrt(r) instead (D. Kalajdzievski, 2023)

  double scaling() const;  // lora_alpha / r
  bool operator==(const LoraScale&) const = default;
};

struct LoraAdapter : LinearAdapter {
  LoraAdapter(LoraMatrix a, LoraMatrix b, LoraScale scale, double dropout);
  /// Adds the adapter's term of `input` to `output`: computed in the matrices' dtype, returned in the output's. Applies
  /// dropout to `input` in training.
  at::Tensor add_to(const at::Tensor& output, const at::Tensor& input) const override;
  at::Tensor product() const;  // scaling * B A, [out, in]

  LoraMatrix lora_A, lora_B;
  LoraScale scale;
  double dropout;
};

/// Returns the adapter of a module, or null if it is not a Linear or has none.
std::shared_ptr<const LoraAdapter> find_lora_adapter(const torch::nn::Module& module);

}  // namespace tessera::nn
