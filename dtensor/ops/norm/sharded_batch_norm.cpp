#include "dtensor/ops/norm/sharded_batch_norm.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "dtensor/ops/norm/batch_statistics.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

/// Returns the axes of more than one rank that shard items.
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

/// Returns the number of values per channel on all ranks.
at::Tensor values_per_channel(const DTensorSpec& input) {
  return at::scalar_tensor(c10::multiply_integers(input.sizes()) / input.sizes()[kChannelDim], at::kDouble);
}

/// Returns an undefined tensor if there is none, or no such argument.
at::Tensor optional_tensor(const c10::OperatorHandle& op, torch::jit::Stack* stack, const char* name) {
  const auto index = op.schema().argumentIndexWithName(name);
  const auto value = index ? local_argument(op, stack, static_cast<size_t>(*index)) : c10::IValue();
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

double number(const c10::OperatorHandle& op, torch::jit::Stack* stack, const char* name) {
  return local_argument(op, stack, static_cast<size_t>(op.schema().argumentIndexWithName(name).value())).toDouble();
}

}  // namespace

bool shards_items(const DTensorSpec& input) {
  return !item_axes(input).empty();
}

void sharded_batch_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto& input = *plan.operands[0];
  const auto items = local_argument(op, stack, 0).toTensor();
  const double eps = number(op, stack, "eps");
  const auto statistics = batch_statistics(items, input.mesh(), item_axes(input));
  const auto variance = statistics.variance();
  auto mean = optional_tensor(op, stack, "running_mean"), var = optional_tensor(op, stack, "running_var");
  const auto& returns = op.schema().returns();
  if (returns.back().name() == "running_var_out") {
    mean = mean.clone();
    var = var.clone();
  }
  if (mean.defined() || var.defined()) {
    update_running_statistics(mean, var, statistics, number(op, stack, "momentum"));
  }
  std::vector<c10::IValue> results{normalized_items(items, optional_tensor(op, stack, "weight"),
                                                    optional_tensor(op, stack, "bias"), statistics.mean, variance, eps),
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

void sharded_batch_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto& input = *plan.operands[1];
  const auto mask = local_argument(op, stack, kMask).toBoolList();
  BatchNormGradient gradient(local_argument(op, stack, 0).toTensor(), local_argument(op, stack, 1).toTensor(),
                             local_argument(op, stack, kSavedMean).toTensor(),
                             local_argument(op, stack, kSavedInverseDeviation).toTensor().to(at::kDouble));
  at::Tensor of_items;
  if (mask.get(0)) {
    gradient.add_up(input.mesh(), item_axes(input));
    of_items = gradient.of_items(optional_tensor(op, stack, "weight"), values_per_channel(input));
  }
  std::vector<c10::IValue> results;
  size_t next = 0;
  for (const auto& result : {of_items, gradient.of_weight(), gradient.of_bias()}) {
    results.emplace_back(mask.get(results.size()) ? result.to(plan.outputs[next++]->dtype()) : at::Tensor());
  }
  set_results(op, stack, std::move(results));
}

}  // namespace tessera
