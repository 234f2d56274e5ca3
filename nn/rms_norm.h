#pragma once
// Root mean square normalization, which libtorch's C++ modules lack: x / sqrt(mean(x^2) + eps) * weight over the
// last dims (B. Zhang, R. Sennrich: Root Mean Square Layer Normalization, 2019). Same as Python's torch.nn.RMSNorm.
//
//   tessera::nn::RMSNorm norm(RMSNormOptions({64}).eps(1e-6));

#include <torch/arg.h>
#include <torch/nn/cloneable.h>

#include <optional>
#include <ostream>
#include <utility>
#include <vector>

#include "nn/hooks/hooked.h"

namespace tessera::nn {

struct RMSNormOptions {
  // As libtorch's options of norms, which convert from a shape.
  // NOLINTNEXTLINE(google-explicit-constructor)
  RMSNormOptions(std::vector<int64_t> normalized_shape) : normalized_shape_(std::move(normalized_shape)) {}
  // NOLINTNEXTLINE(google-explicit-constructor)
  RMSNormOptions(int64_t normalized_size) : normalized_shape_{normalized_size} {}
  /// Sizes of the last dims, over which the mean is taken.
  TORCH_ARG(std::vector<int64_t>, normalized_shape);
  /// Added to the mean of squares; none: the machine epsilon of the input's dtype.
  TORCH_ARG(std::optional<double>, eps) = std::nullopt;
  /// Whether there is a weight, which starts as ones.
  TORCH_ARG(bool, elementwise_affine) = true;
};

/// Errors: ValueError for an empty normalized_shape or a size below 1.
class RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  explicit RMSNormImpl(RMSNormOptions options_);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);

  RMSNormOptions options;
  /// Undefined without elementwise_affine.
  at::Tensor weight;
};

TESSERA_MODULE(RMSNorm);

}  // namespace tessera::nn
