#pragma once
// Batch norm in training over the items of several ranks, which exchange a few numbers per channel. All ranks get the
// same bits.
//
// If 2 ranks have the values [1, 3] (rank 0) and [8] (rank 1) of a channel, each sends its count, mean and sum of
// squared deviations, (2, 2, 2) and (1, 8, 0). Both then know the mean 4, the sum 2 + 0 + 2 (2 - 4)^2 + 1 (8 - 4)^2 =
// 26, and so the variance 26 / 3. A rank without items sends zeros.
//
// Items are [N, C, ...] with channels C, on the CPU or a GPU, and may be empty. Numbers per channel are float64 tensors
// [C], so only local kernels round.
//
// Statistics are combined as in T. F. Chan, G. H. Golub, R. J. LeVeque, Updating Formulae and a Pairwise Algorithm for
// Computing Sample Variances, 1979, which loses no digits to a large mean. Gradients are those of S. Ioffe and C.
// Szegedy (arXiv:1502.03167), with sums over all ranks.
// Thread safety: for the thread that runs the rank's forward and backward.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "device_mesh/device_mesh.h"

namespace tessera {

/// Dim of the channels: sizes are samples, channels, and others.
inline constexpr int64_t kChannelDim = 1;

struct BatchStatistics {
  at::Tensor mean;
  at::Tensor squares;  // sum of squared deviations from the mean
  at::Tensor count;    // values per channel, [1]

  at::Tensor variance() const { return squares.div(count); }
};

/// Returns statistics of all ranks' items along these axes of `mesh`. All ranks must call it.
BatchStatistics batch_statistics(const at::Tensor& items, const DeviceMesh& mesh, const std::vector<int64_t>& axes);

/// Updates running statistics as in training; skips undefined tensors.
void update_running_statistics(const at::Tensor& mean, const at::Tensor& variance, const BatchStatistics& statistics,
                               double momentum);

/// Returns (items - mean) / deviation, times `weight` and plus `bias` if defined.
at::Tensor normalized_items(const at::Tensor& items, const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& mean, const at::Tensor& variance, double eps);

/// Returns 1 / sqrt(variance + eps), or 0 if that is infinite, like ATen's kernels.
at::Tensor inverse_deviation(const at::Tensor& variance, double eps);

/// Gradients of normalized_items, with statistics of the items.
class BatchNormGradient {
 public:
  /// `grad` is the result's. `inverse_deviation` is float64; `mean` may be narrower. Gradients of 16-bit items are
  /// float32.
  BatchNormGradient(const at::Tensor& grad, const at::Tensor& items, const at::Tensor& mean,
                    at::Tensor inverse_deviation);

  /// Returns this rank's gradient, or that of all ranks after add_up().
  at::Tensor of_weight() const { return centered_sum_.mul(inverse_); }
  const at::Tensor& of_bias() const { return grad_sum_; }
  /// Adds up the sums along the same axes. All ranks must call it.
  void add_up(const DeviceMesh& mesh, const std::vector<int64_t>& axes);
  /// Returns this rank's gradient of the items; once, after add_up(). `count` is the number of values per channel on
  /// all ranks, possibly on the CPU. `weight` may be undefined.
  at::Tensor of_items(const at::Tensor& weight, const at::Tensor& count);

 private:
  at::Tensor grad_, inverse_;
  at::Tensor centered_;      // items minus mean
  at::Tensor product_;       // of that and the gradient
  at::Tensor grad_sum_;      // over the items, like the next
  at::Tensor centered_sum_;  // of the product
};

}  // namespace tessera
