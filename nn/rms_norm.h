#pragma once
// Root mean square normalization, which libtorch's C++ modules lack: x / sqrt(mean(x^2) + eps) * weight over the last
// dims. It equals Python's torch.nn.RMSNorm, except for rounding unless options.fused is false.
//
//   tessera::nn::RMSNorm norm(RMSNormOptions({64}).eps(1e-6));
//
// Source: B. Zhang, R. Sennrich, Root Mean Square Layer Normalization, 2019.

#include <torch/arg.h>
#include <torch/nn/cloneable.h>

#include <optional>
#include <ostream>
#include <utility>
#include <vector>

#include "nn/hooks/hooked.h"

namespace tessera::nn {

struct RMSNormOptions {
  // Converts from a shape, like libtorch's options of norms.
  // NOLINTNEXTLINE(google-explicit-constructor)
  RMSNormOptions(std::vector<int64_t> normalized_shape) : normalized_shape_(std::move(normalized_shape)) {}
  // NOLINTNEXTLINE(google-explicit-constructor)
  RMSNormOptions(int64_t normalized_size) : normalized_shape_{normalized_size} {}
  /// Sizes of the last dims, over which the mean is computed.
  TORCH_ARG(std::vector<int64_t>, normalized_shape);
  /// Added to the mean of squares. Default: the machine epsilon of the input's dtype.
  TORCH_ARG(std::optional<double>, eps) = std::nullopt;
  /// Adds a weight, initially ones.
  TORCH_ARG(bool, elementwise_affine) = true;
  /// Uses fused/rms_norm.h if the mean is over one dim and there is a weight.
  TORCH_ARG(bool, fused) = true;
};

/// Throws ValueError for an empty normalized_shape and for a size below 1.
class RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  explicit RMSNormImpl(RMSNormOptions options_);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);

  RMSNormOptions options;
  at::Tensor weight;  // undefined without elementwise_affine
};

TESSERA_MODULE(RMSNorm);

}  // namespace tessera::nn
