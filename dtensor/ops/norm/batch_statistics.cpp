#include "dtensor/ops/norm/batch_statistics.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <optional>
#include <utility>

#include "comm/collectives.h"

namespace tessera {

namespace {

at::Tensor packed(const BatchStatistics& statistics) {
  return at::cat({statistics.mean, statistics.squares, statistics.count}, /*dim=*/-1);
}

/// Unpacks `numbers` of one rank, or of one rank per row.
BatchStatistics unpack(const at::Tensor& numbers) {
  const int64_t channels = (numbers.size(-1) - 1) / 2;
  return {.mean = numbers.narrow(-1, 0, channels),
          .squares = numbers.narrow(-1, channels, channels),
          .count = numbers.narrow(-1, 2 * channels, 1)};
}

BatchStatistics local_statistics(const at::Tensor& items) {
  const auto options = items.options().dtype(at::kDouble);
  const int64_t channels = items.size(kChannelDim);
  if (items.numel() == 0) {
    return unpack(at::zeros({2 * channels + 1}, options));
  }
  std::optional<at::Tensor> unread_mean, unread_var;
  if (at::isReducedFloatingType(items.scalar_type())) {
    // Kernels return statistics in the dtype of the running ones that they update; 16 bits would be too few.
    unread_mean = at::zeros({channels}, items.options().dtype(at::toOpMathType(items.scalar_type())));
    unread_var = unread_mean->clone();
  }
  const auto [mean, variance] = at::batch_norm_update_stats(items, unread_mean, unread_var, /*momentum=*/0);
  const int64_t count = items.numel() / channels;
  return {.mean = mean.to(at::kDouble),
          .squares = variance.to(at::kDouble).mul(count),
          .count = at::full({1}, count, options)};
}

/// Combines the statistics of all ranks, one per row.
BatchStatistics combined(const BatchStatistics& ranks) {
  const auto count = ranks.count.sum(0);
  const auto mean = ranks.mean.mul(ranks.count).sum(0).div_(count.clamp_min(1));
  const auto between = ranks.mean.sub(mean).masked_fill_(ranks.count.eq(0), 0).square_().mul_(ranks.count);
  return {.mean = mean, .squares = between.add_(ranks.squares).sum(0), .count = count};
}

void update(const at::Tensor& running, const at::Tensor& value, double momentum) {
  if (running.defined()) {
    running.copy_(running.to(at::kDouble).mul(1 - momentum).add_(value, momentum));
  }
}

/// Reshapes one number per channel for broadcasting with the items.
at::Tensor beside(const at::Tensor& numbers, const at::Tensor& items) {
  std::vector<int64_t> sizes(static_cast<size_t>(items.dim()), 1);
  sizes[kChannelDim] = numbers.numel();
  return numbers.to(items.scalar_type()).view(sizes);
}

}  // namespace

BatchStatistics batch_statistics(const at::Tensor& items, const DeviceMesh& mesh, const std::vector<int64_t>& axes) {
  auto statistics = local_statistics(items);
  for (const int64_t axis : axes) {
    const auto numbers = packed(statistics);
    const auto all = at::empty({mesh.shape()[static_cast<size_t>(axis)], numbers.numel()}, numbers.options());
    all_gather(all, numbers, mesh.group(axis));
    statistics = combined(unpack(all));
  }
  return statistics;
}

void update_running_statistics(const at::Tensor& mean, const at::Tensor& variance, const BatchStatistics& statistics,
                               double momentum) {
  update(mean, statistics.mean, momentum);
  update(variance, statistics.squares.div(statistics.count - 1), momentum);
}

/// Normalizes with kernels that accept statistics.
at::Tensor normalized_items(const at::Tensor& items, const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& mean, const at::Tensor& variance, double eps) {
  if (items.numel() == 0) {
    return at::empty_like(items);
  }
  const auto dtype = at::toOpMathType(items.scalar_type());
  const auto as_computed = [dtype](const at::Tensor& parameter) {
    return parameter.defined() ? std::optional(parameter.to(dtype)) : std::nullopt;
  };
  auto given = variance.to(dtype);
  if (eps == 0) {  // in training, kernels treat the inverse of a zero deviation as 0
    given = given.masked_fill(given.eq(0), std::numeric_limits<double>::infinity());
  }
  return std::get<0>(at::native_batch_norm(items, as_computed(weight), as_computed(bias), mean.to(dtype), given,
                                           /*training=*/false, /*momentum=*/0, eps));
}

at::Tensor inverse_deviation(const at::Tensor& variance, double eps) {
  const auto inverse = variance.add(eps).rsqrt_();
  return eps == 0 ? inverse.masked_fill_(variance.eq(0), 0) : inverse;
}

BatchNormGradient::BatchNormGradient(const at::Tensor& grad, const at::Tensor& items, const at::Tensor& mean,
                                     at::Tensor inverse_deviation)
    : grad_(grad.to(at::toOpMathType(grad.scalar_type()))), inverse_(std::move(inverse_deviation)) {
  const auto wide = items.to(at::toOpMathType(items.scalar_type()));
  centered_ = wide - beside(mean, wide);
  product_ = centered_ * grad_;
  std::vector<int64_t> item_dims;
  for (int64_t dim = 0; dim < items.dim(); ++dim) {
    if (dim != kChannelDim) {
      item_dims.push_back(dim);
    }
  }
  grad_sum_ = grad_.sum(item_dims).to(at::kDouble);
  centered_sum_ = product_.sum(item_dims).to(at::kDouble);
}

void BatchNormGradient::add_up(const DeviceMesh& mesh, const std::vector<int64_t>& axes) {
  const auto sums = at::cat({grad_sum_, centered_sum_});
  for (const int64_t axis : axes) {
    all_reduce(sums, ReduceOp::Sum, mesh.group(axis));
  }
  grad_sum_ = sums.narrow(0, 0, grad_sum_.numel());
  centered_sum_ = sums.narrow(0, grad_sum_.numel(), centered_sum_.numel());
}

/// Computes, with sums over the N values of a channel: weight * invstd * (g - sum(g) / N - (x - mean) * invstd^2 *
/// sum(g * (x - mean)) / N).
at::Tensor BatchNormGradient::of_items(const at::Tensor& weight, const at::Tensor& count) {
  const auto scale = weight.defined() ? inverse_.mul(weight) : inverse_;
  const auto of_deviation = centered_sum_.mul(inverse_).mul_(inverse_).mul_(scale).div_(count).neg_();
  at::mul_out(product_, grad_, beside(scale, grad_));
  product_.addcmul_(centered_, beside(of_deviation, grad_));
  return product_.sub_(beside(grad_sum_.mul(scale).div_(count), grad_));
}

}  // namespace tessera
