#pragma once
// Loss scaling for float16 with sharded gradients. It keeps small gradients from underflowing. When a gradient
// overflows on any rank, all ranks skip the step and reduce the scale.
//
//   ShardedGradScaler scaler;
//   optimizer.zero_grad();
//   scaler.scale(loss(model(batch))).backward();
//   scaler.unscale_(optimizer);                               // only needed to read gradients before the step
//   clip_grad_norm_(model->parameters(), 1.0);
//   scaler.step(optimizer);                                   // skipped if a gradient is infinite or NaN
//   scaler.update();
//
// Gradients may be plain tensors, or DTensors on any mesh. Throws StateError for calls out of this order and ValueError
// for numbers out of range.
//
// Thread safety: for the thread that runs the rank's forward and backward.
// Source: torch/distributed/fsdp/sharded_grad_scaler.py and torch/amp/grad_scaler.py; libtorch has no C++ version.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <optional>

#include "device_mesh/device_mesh.h"

namespace tessera {

struct GradScalerOptions {
  double init_scale = 65536;
  /// Factors for the scale: growth after growth_interval steps without an overflow, backoff after one with.
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  /// With false, scale() returns the loss, step() always steps, and nothing is communicated.
  bool enabled = true;
  /// Ranks that step together. Default: the default group.
  std::optional<DeviceMesh> mesh = std::nullopt;
};

class ShardedGradScaler {
 public:
  explicit ShardedGradScaler(GradScalerOptions options = {});

  /// Returns the loss times the scale, in the loss's dtype. Supports autograd.
  at::Tensor scale(const at::Tensor& loss) const;
  /// Divides the optimizer's gradients by the scale, once per update(), and checks whether all are finite on all ranks.
  /// Collective.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Unscales if needed, and steps if all gradients are finite, once per update(). Returns whether it stepped.
  /// Collective.
  bool step(torch::optim::Optimizer& optimizer);
  /// Updates the scale from the results of the steps since the last update(), or sets it to `new_scale`.
  void update(std::optional<double> new_scale = std::nullopt);

  double get_scale() const { return options_.enabled ? scale_ : 1; }
  bool is_enabled() const { return options_.enabled; }

 private:
  struct Found {
    bool is_finite = true;
    bool stepped = false;
  };

  GradScalerOptions options_;
  double scale_;
  int64_t steps_without_overflow_ = 0;
  std::map<const torch::optim::Optimizer*, Found> found_;  // since the last update()
};

}  // namespace tessera
