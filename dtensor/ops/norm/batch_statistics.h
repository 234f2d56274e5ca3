#pragma once
// Batch norm in training over the items of several ranks, which exchange a few numbers a channel and leave the items
// where they are. All ranks get the statistics of the whole batch, to the same bits.
//
// With 2 ranks that hold the values [1, 3] (rank 0) and [8] (rank 1) of a channel, each sends its count, mean and sum
// of squared deviations, (2, 2, 2) and (1, 8, 0). Both then know the mean 4 and the sum 2 + 0 + 2 (2 - 4)^2 +
// 1 (8 - 4)^2 = 26, and so the variance 26 / 3. A rank without items sends zeros.
//
// Items are [N, C, ...] with the channels C, on the CPU or a GPU, empty ones too. Numbers a channel are float64 tensors
// [C], so that only the local kernels round.
//
// The statistics are put together as T. F. Chan, G. H. Golub, R. J. LeVeque do (Updating Formulae and a Pairwise
// Algorithm for Computing Sample Variances, 1979), which loses no digits to a large mean. Gradients are those of S.
// Ioffe and C. Szegedy (arXiv:1502.03167); each of their two sums goes over all ranks.
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "device_mesh/device_mesh.h"

namespace tessera {

/// The channels of a batch: its sizes are samples, channels, and what each channel has.
inline constexpr int64_t kChannelDim = 1;

struct BatchStatistics {
  at::Tensor mean;
  at::Tensor squares;  // the sum of squared deviations from the mean
  at::Tensor count;    // values a channel, [1]

  at::Tensor variance() const { return squares.div(count); }
};

/// Of the items of all ranks along these axes of `mesh`. Collective.
BatchStatistics batch_statistics(const at::Tensor& items, const DeviceMesh& mesh, const std::vector<int64_t>& axes);

/// What training does to running statistics; an undefined tensor stays.
void update_running_statistics(const at::Tensor& mean, const at::Tensor& variance, const BatchStatistics& statistics,
                               double momentum);

/// The items less the mean, over the deviation, times `weight` and plus `bias` if there are any.
at::Tensor normalized_items(const at::Tensor& items, const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& mean, const at::Tensor& variance, double eps);

/// 1 / sqrt(variance + eps); 0 where that is infinite, as kernels have it.
at::Tensor inverse_deviation(const at::Tensor& variance, double eps);

/// The gradients of normalized_items, with statistics of the items.
class BatchNormGradient {
 public:
  /// `grad` is that of the result. `inverse_deviation` is a float64 tensor, `mean` may be narrower. Gradients of items
  /// of 16 bits are in float32.
  BatchNormGradient(const at::Tensor& grad, const at::Tensor& items, const at::Tensor& mean,
                    at::Tensor inverse_deviation);

  /// Of this rank's items, and of all ranks' after add_up().
  at::Tensor of_weight() const { return centered_sum_.mul(inverse_); }
  const at::Tensor& of_bias() const { return grad_sum_; }
  /// Over the same axes. Collective.
  void add_up(const DeviceMesh& mesh, const std::vector<int64_t>& axes);
  /// Of this rank's items; once, after add_up(). `count`: values a channel on all ranks, one number, also on the CPU.
  /// `weight` may be undefined.
  at::Tensor of_items(const at::Tensor& weight, const at::Tensor& count);

 private:
  at::Tensor grad_, inverse_;
  at::Tensor centered_;      // items less their mean
  at::Tensor product_;       // with the gradient
  at::Tensor grad_sum_;      // over the items, as the next
  at::Tensor centered_sum_;  // of the product
};

}  // namespace tessera
