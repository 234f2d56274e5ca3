#pragma once
// The training loop of the parity tests: a few steps of SGD with momentum on the model's own input. Not Adam, whose
// steps do not depend on the scale of the gradients and would hide a wrong one.
// After _train_for_several_steps in torch/testing/_internal/common_fsdp.py.

#include <optional>

#include "fully_shard/layout/policy.h"
#include "fully_shard/sharded_grad_scaler.h"
#include "testing/fsdp_models/test_model.h"

namespace tessera::testing {

struct TrainOptions {
  int num_steps = 2;
  double lr = 0.01;
  /// Runs forward and loss under autocast to mixed_precision's param_dtype (bfloat16 if it names none).
  bool autocast = false;
  /// In every step: copy the state, clear the model, load the copy. Training must not notice.
  bool save_model = false;
  /// What the sharded model computes in; a plain one gets inputs in that dtype.
  std::optional<MixedPrecisionPolicy> mixed_precision = std::nullopt;
  /// The model is in float16; inputs are cast to it.
  bool use_pure_fp16 = false;
  /// Scales losses, and skips the steps in which a gradient of some rank is not finite. Off by default.
  GradScalerOptions grad_scaler = {.enabled = false};
};

/// Whether a module of it is a unit of fully_shard or replicate.
bool is_sharded_model(torch::nn::Module& model);

/// Trains, and returns the last step's loss, of the parameters before that step's update, detached: with a grad_scaler
/// the scaled one.
/// Throws ExpectationError if a loss has another dtype than the options say: float32; float16 for pure fp16; the
/// policy's param_dtype for a sharded model with mixed precision; or if a unit is not idle and sharded at the end.
/// Collective.
at::Tensor train_for_several_steps(FSDPTestModel& model, const TrainOptions& options = {});

/// All losses, in order.
std::vector<double> train_losses(FSDPTestModel& model, const TrainOptions& options);

}  // namespace tessera::testing
