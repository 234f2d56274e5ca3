#include "optim/sharded_grad_scaler.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "dtensor/local/dtensor_impl.h"

namespace tessera {

namespace {

/// Device and dtype, which the gradients of one op share.
using Kind = std::pair<at::ScalarType, at::DeviceIndex>;

at::Tensor local_of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return meta ? meta->local : tensor;
}

/// This rank's local gradients by kind, and the parameters' device (the CPU without any). Tied parameters, which
/// libtorch's parameters() lists twice, occur once.
struct LocalGradients {
  std::map<Kind, std::vector<at::Tensor>> by_kind;
  at::Device device = at::kCPU;
};

LocalGradients local_gradients(torch::optim::Optimizer& optimizer) {
  LocalGradients gradients;
  std::unordered_set<c10::TensorImpl*> seen;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& param : group.params()) {
      if (!param.defined()) {
        continue;
      }
      gradients.device = param.device();
      if (param.grad().defined() && seen.insert(param.unsafeGetTensorImpl()).second) {
        auto grad = local_of(param.grad());
        gradients.by_kind[{grad.scalar_type(), grad.device().index()}].push_back(std::move(grad));
      }
    }
  }
  return gradients;
}

/// Makes `found` nonzero on all ranks if it is nonzero on any.
void agree(const at::Tensor& found, const std::optional<DeviceMesh>& mesh) {
  if (!mesh) {
    all_reduce(found, ReduceOp::Max, default_group());
    return;
  }
  for (int64_t axis = 0; axis < mesh->ndim(); ++axis) {
    all_reduce(found, ReduceOp::Max, mesh->group(axis));
  }
}

}  // namespace

ShardedGradScaler::ShardedGradScaler(GradScalerOptions options)
    : options_(std::move(options)), scale_(options_.init_scale) {
  TESSERA_CHECK(ValueError, std::isfinite(scale_) && scale_ > 0, "ShardedGradScaler: init_scale is {}; it is above 0",
                scale_);
  TESSERA_CHECK(ValueError, options_.growth_factor > 1, "ShardedGradScaler: growth_factor is {}; it is above 1",
                options_.growth_factor);
  TESSERA_CHECK(ValueError, options_.backoff_factor > 0 && options_.backoff_factor < 1,
                "ShardedGradScaler: backoff_factor is {}; it is between 0 and 1", options_.backoff_factor);
  TESSERA_CHECK(ValueError, options_.growth_interval >= 1, "ShardedGradScaler: growth_interval is {}; it is 1 or more",
                options_.growth_interval);
}

at::Tensor ShardedGradScaler::scale(const at::Tensor& loss) const {
  if (!options_.enabled) {
    return loss;
  }
  // A scale of 65536 exceeds float16, but the product may be in range.
  const auto dtype = loss.scalar_type();
  return dtype == at::kHalf ? (loss.to(at::kFloat) * scale_).to(dtype) : loss * scale_;
}

void ShardedGradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    return;
  }
  TESSERA_CHECK(StateError, !found_.contains(&optimizer),
                "unscale_: the gradients of this optimizer were unscaled since the last update() already; call "
                "update() once a step");
  const at::AutoDispatchBelowADInplaceOrView below;
  auto [by_kind, device] = local_gradients(optimizer);
  auto found = at::zeros({1}, at::TensorOptions(device).dtype(at::kFloat));
  for (auto& [kind, gradients] : by_kind) {
    const auto options = at::TensorOptions(gradients[0].device()).dtype(at::kFloat);
    auto found_here = at::zeros({1}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_here, at::full({}, 1 / scale_, options));
    found.add_(found_here.to(device));
  }
  agree(found, options_.mesh);
  found_[&optimizer] = {.is_finite = found.item<float>() == 0, .stepped = false};
}

bool ShardedGradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  if (!found_.contains(&optimizer)) {
    unscale_(optimizer);
  }
  auto& found = found_.at(&optimizer);
  TESSERA_CHECK(StateError, !found.stepped,
                "step: this optimizer stepped since the last update() already; call update() once a step");
  found.stepped = true;
  if (found.is_finite) {
    optimizer.step();
  }
  return found.is_finite;
}

void ShardedGradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) {
    return;
  }
  TESSERA_CHECK(ValueError, !new_scale || (std::isfinite(*new_scale) && *new_scale > 0),
                "update: the scale is {}; it is positive and finite", new_scale.value_or(0));
  TESSERA_CHECK(StateError, new_scale || !found_.empty(),
                "update: no optimizer stepped since the last update(); call step(optimizer) before it");
  bool all_finite = true;
  for (const auto& [optimizer, found] : found_) {
    all_finite = all_finite && found.is_finite;
  }
  found_.clear();
  if (new_scale) {
    scale_ = *new_scale;
  } else if (!all_finite) {
    scale_ *= options_.backoff_factor;
    steps_without_overflow_ = 0;
  } else if (++steps_without_overflow_ == options_.growth_interval) {
    const double grown = scale_ * options_.growth_factor;
    scale_ = std::isfinite(static_cast<float>(grown)) ? grown : scale_;
    steps_without_overflow_ = 0;
  }
}

}  // namespace tessera
