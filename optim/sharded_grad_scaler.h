#pragma once
// Loss scaling for float16, over sharded gradients: small gradients survive, and when one overflows on any rank all
// ranks skip the step together and scale less from then on.
//
//   ShardedGradScaler scaler;
//   optimizer.zero_grad();
//   scaler.scale(loss(model(batch))).backward();
//   scaler.unscale_(optimizer);                               // only where gradients are looked at before the step
//   clip_grad_norm_(model->parameters(), 1.0);
//   scaler.step(optimizer);                                   // or not, if a gradient is infinite or NaN
//   scaler.update();
//
// Gradients may be DTensors on any mesh, and plain. Throws StateError for calls out of this order, ValueError for
// numbers out of range.
//
// Thread safety: for the thread that runs the rank's forward and backward.
// After torch/distributed/fsdp/sharded_grad_scaler.py and torch/amp/grad_scaler.py. libtorch has none in C++.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <optional>

#include "device_mesh/device_mesh.h"

namespace tessera {

struct GradScalerOptions {
  double init_scale = 65536;
  /// Multiply the scale after growth_interval steps in a row without an overflow, and after one with.
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  /// false: scale() returns the loss, step() always steps, and nothing is sent.
  bool enabled = true;
  /// Ranks that step together. Default: all of the default group.
  std::optional<DeviceMesh> mesh = std::nullopt;
};

class ShardedGradScaler {
 public:
  explicit ShardedGradScaler(GradScalerOptions options = {});

  /// Returns the loss times the scale, in the loss's dtype. Differentiable.
  at::Tensor scale(const at::Tensor& loss) const;
  /// Divides the optimizer's gradients by the scale, once an update(), and looks for any rank's that is not finite.
  /// Collective.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Unscales if that was not done, and steps, once an update(), if all gradients are finite; returns whether it did.
  /// Collective.
  bool step(torch::optim::Optimizer& optimizer);
  /// Changes the scale by what the steps since the last update() found, or to `new_scale`.
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
