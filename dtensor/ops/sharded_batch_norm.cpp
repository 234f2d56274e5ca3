#include "dtensor/ops/sharded_batch_norm.h"

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
#include <vector>

#include "comm/collectives.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

constexpr int64_t kChannelDim = 1;

/// The axes of more than one rank that cut items.
std::vector<int64_t> item_axes(const DTensorSpec& input) {
  std::vector<int64_t> axes;
  for (size_t axis = 0; axis < input.placements().size(); ++axis) {
    const auto& placement = input.placements()[axis];
    if (placement.is_shard() && !placement.is_shard(kChannelDim) && input.mesh().shape()[axis] > 1) {
      axes.push_back(static_cast<int64_t>(axis));
    }
  }
  return axes;
}

/// Values a channel, on all ranks.
double count_of(const DTensorSpec& input) {
  return static_cast<double>(c10::multiply_integers(input.sizes()) / input.sizes()[kChannelDim]);
}

/// One number a channel, but for the count. In float64, so that only the local kernels round.
struct Statistics {
  at::Tensor mean;
  at::Tensor squares;  // the sum of squared deviations from the mean
  at::Tensor count;    // [1]

  at::Tensor packed() const { return at::cat({mean, squares, count}, /*dim=*/-1); }
  /// `numbers` are those of one rank, or a row a rank.
  static Statistics unpack(const at::Tensor& numbers) {
    const int64_t channels = (numbers.size(-1) - 1) / 2;
    return {.mean = numbers.narrow(-1, 0, channels),
            .squares = numbers.narrow(-1, channels, channels),
            .count = numbers.narrow(-1, 2 * channels, 1)};
  }
};

Statistics local_statistics(const at::Tensor& items) {
  const auto options = items.options().dtype(at::kDouble);
  const int64_t channels = items.size(kChannelDim);
  if (items.numel() == 0) {
    return Statistics::unpack(at::zeros({2 * channels + 1}, options));
  }
  std::optional<at::Tensor> unread_mean, unread_var;
  if (at::isReducedFloatingType(items.scalar_type())) {
    // Kernels give statistics in the dtype of the running ones that they update; 16 bits would be too few.
    unread_mean = at::zeros({channels}, items.options().dtype(at::toOpMathType(items.scalar_type())));
    unread_var = unread_mean->clone();
  }
  const auto [mean, variance] = at::batch_norm_update_stats(items, unread_mean, unread_var, /*momentum=*/0);
  const int64_t count = items.numel() / channels;
  return {.mean = mean.to(at::kDouble),
          .squares = variance.to(at::kDouble).mul(count),
          .count = at::full({1}, count, options)};
}

/// Of all ranks' items, from a row a rank.
Statistics combined(const Statistics& ranks) {
  const auto count = ranks.count.sum(0);
  const auto mean = ranks.mean.mul(ranks.count).sum(0).div_(count.clamp_min(1));
  const auto between = ranks.mean.sub(mean).masked_fill_(ranks.count.eq(0), 0).square_().mul_(ranks.count);
  return {.mean = mean, .squares = between.add_(ranks.squares).sum(0), .count = count};
}

Statistics batch_statistics(const at::Tensor& items, const DTensorSpec& input) {
  auto statistics = local_statistics(items);
  for (const int64_t axis : item_axes(input)) {
    const auto numbers = statistics.packed();
    const auto all = at::empty({input.mesh().shape()[static_cast<size_t>(axis)], numbers.numel()}, numbers.options());
    all_gather(all, numbers, input.mesh().group(axis));
    statistics = combined(Statistics::unpack(all));
  }
  return statistics;
}

/// Undefined if there is none, or no such argument.
at::Tensor optional_tensor(const c10::OperatorHandle& op, torch::jit::Stack* stack, const char* name) {
  const auto index = op.schema().argumentIndexWithName(name);
  const auto value = index ? local_argument(op, stack, static_cast<size_t>(*index)) : c10::IValue();
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

double number(const c10::OperatorHandle& op, torch::jit::Stack* stack, const char* name) {
  return local_argument(op, stack, static_cast<size_t>(op.schema().argumentIndexWithName(name).value())).toDouble();
}

void update(const at::Tensor& running, const at::Tensor& value, double momentum) {
  running.copy_(running.to(at::kDouble).mul(1 - momentum).add_(value, momentum));
}

/// The items less the mean, over the deviation: what kernels compute where statistics are given.
at::Tensor normalized_items(const at::Tensor& items, std::optional<at::Tensor> weight, std::optional<at::Tensor> bias,
                            const Statistics& statistics, const at::Tensor& variance, double eps) {
  if (items.numel() == 0) {
    return at::empty_like(items);
  }
  const auto dtype = at::toOpMathType(items.scalar_type());
  for (auto* parameter : {&weight, &bias}) {
    *parameter = *parameter && (*parameter)->defined() ? std::optional((*parameter)->to(dtype)) : std::nullopt;
  }
  auto given = variance.to(dtype);
  if (eps == 0) {  // in training they take the inverse of no deviation for 0
    given = given.masked_fill(given.eq(0), std::numeric_limits<double>::infinity());
  }
  return std::get<0>(at::native_batch_norm(items, weight, bias, statistics.mean.to(dtype), given, /*training=*/false,
                                           /*momentum=*/0, eps));
}

at::Tensor inverse_deviation(const at::Tensor& variance, double eps) {
  const auto inverse = variance.add(eps).rsqrt_();
  return eps == 0 ? inverse.masked_fill_(variance.eq(0), 0) : inverse;
}

/// One number a channel, to be combined with the items.
at::Tensor beside(const at::Tensor& numbers, const at::Tensor& items) {
  DimVector sizes(static_cast<size_t>(items.dim()), 1);
  sizes[kChannelDim] = numbers.numel();
  return numbers.to(items.scalar_type()).view(sizes);
}

/// What the gradients are made of: sums over items, one number a channel.
struct GradientSums {
  at::Tensor grad;      // of the gradient
  at::Tensor centered;  // of the gradient times the item less the mean

  void over_ranks(const DTensorSpec& input) {
    const auto sums = at::cat({grad, centered});
    for (const int64_t axis : item_axes(input)) {
      all_reduce(sums, ReduceOp::Sum, input.mesh().group(axis));
    }
    grad = sums.narrow(0, 0, grad.numel());
    centered = sums.narrow(0, grad.numel(), centered.numel());
  }
};

}  // namespace

bool cuts_items(const DTensorSpec& input) {
  return !item_axes(input).empty();
}

void sharded_batch_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto& input = *plan.operands[0];
  const auto items = local_argument(op, stack, 0).toTensor();
  const double count = count_of(input), eps = number(op, stack, "eps");
  const auto statistics = batch_statistics(items, input);
  const auto variance = statistics.squares.div(count);
  auto mean = optional_tensor(op, stack, "running_mean"), var = optional_tensor(op, stack, "running_var");
  const auto& returns = op.schema().returns();
  if (returns.back().name() == "running_var_out") {
    mean = mean.clone();
    var = var.clone();
  }
  if (mean.defined()) {
    update(mean, statistics.mean, number(op, stack, "momentum"));
  }
  if (var.defined()) {
    update(var, statistics.squares.div(count - 1), number(op, stack, "momentum"));
  }
  std::vector<c10::IValue> results{normalized_items(items, optional_tensor(op, stack, "weight"),
                                                    optional_tensor(op, stack, "bias"), statistics, variance, eps),
                                   statistics.mean.to(plan.outputs[1]->dtype()),
                                   inverse_deviation(variance, eps).to(plan.outputs[2]->dtype())};
  for (size_t i = results.size(); i < returns.size(); ++i) {
    const auto& reserve = plan.outputs[i];
    results.emplace_back(returns[i].name() == "running_mean_out" ? mean
                         : returns[i].name() == "running_var_out"
                             ? var
                             : at::zeros(reserve->local_sizes(), items.options().dtype(reserve->dtype())));
  }
  set_results(op, stack, std::move(results));
}

/// With sums over the N values of a channel: weight * invstd * (g - sum(g) / N - (x - mean) * invstd^2 *
/// sum(g * (x - mean)) / N).
void sharded_batch_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto& input = *plan.operands[1];
  const auto grad = widened(local_argument(op, stack, 0).toTensor());
  const auto items = widened(local_argument(op, stack, 1).toTensor());
  const auto inverse = local_argument(op, stack, kSavedInverseDeviation).toTensor().to(at::kDouble);
  const auto mask = local_argument(op, stack, kMask).toBoolList();
  const auto weight = optional_tensor(op, stack, "weight");

  const auto centered = items - beside(local_argument(op, stack, kSavedMean).toTensor(), items);
  auto product = centered * grad;
  DimVector item_dims;
  for (int64_t dim = 0; dim < items.dim(); ++dim) {
    if (dim != kChannelDim) {
      item_dims.push_back(dim);
    }
  }
  GradientSums sums{.grad = grad.sum(item_dims).to(at::kDouble), .centered = product.sum(item_dims).to(at::kDouble)};

  at::Tensor grad_input;
  if (mask.get(0)) {
    sums.over_ranks(input);
    const double count = count_of(input);
    const auto scale = weight.defined() ? inverse.mul(weight) : inverse;
    const auto of_deviation = sums.centered.mul(inverse).mul_(inverse).mul_(scale).div_(-count);
    at::mul_out(product, grad, beside(scale, items));
    product.addcmul_(centered, beside(of_deviation, items));
    grad_input = product.sub_(beside(sums.grad.mul(scale).div_(count), items));
  }
  std::vector<c10::IValue> results;
  size_t next = 0;
  for (const auto& result : {grad_input, sums.centered.mul(inverse), sums.grad}) {
    results.emplace_back(mask.get(results.size()) ? result.to(plan.outputs[next++]->dtype()) : at::Tensor());
  }
  set_results(op, stack, std::move(results));
}

}  // namespace tessera
