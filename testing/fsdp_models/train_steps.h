#pragma once
// The training loop of the parity tests: a few steps of SGD with momentum on the model's own input. Adam would hide
// wrong gradients, since its steps do not depend on their scale.
// Source: _train_for_several_steps in torch/testing/_internal/common_fsdp.py.

#include <optional>

#include "fully_shard/layout/policy.h"
#include "optim/sharded_grad_scaler.h"
#include "testing/fsdp_models/test_model.h"

namespace tessera::testing {

struct TrainOptions {
  int num_steps = 2;
  double lr = 0.01;
  /// Runs forward and loss under autocast to mixed_precision's param_dtype (default: bfloat16).
  bool autocast = false;
  /// Copies the state, clears the model, and loads the copy in every step, which training must not notice.
  bool save_model = false;
  /// Dtypes of the sharded model; a plain one gets inputs in param_dtype.
  std::optional<MixedPrecisionPolicy> mixed_precision = std::nullopt;
  /// Uses a float16 model and float16 inputs.
  bool use_pure_fp16 = false;
  /// Shards are offloaded: all parameters of a sharded model must be on the CPU after backward, and after forward if
  /// units free theirs then, except those that the outermost unit keeps.
  bool cpu_offload = false;
  bool reshard_after_forward = true;
  std::optional<at::Device> device = std::nullopt;  // of inputs; default: the first parameter's
  /// Scales losses, and skips steps with a gradient that is not finite on some rank. Off by default.
  GradScalerOptions grad_scaler = {.enabled = false};
};

/// Returns whether a module of it is a unit of fully_shard or replicate.
bool is_sharded_model(torch::nn::Module& model);

/// Trains, and returns the last step's loss before its update, detached and, with a grad_scaler, scaled. Throws
/// ExpectationError if a loss has an unexpected dtype (float32; float16 for pure fp16; the policy's param_dtype for a
/// sharded model with mixed precision), if a parameter is not where cpu_offload says, or if a unit is not idle and
/// sharded at the end. All ranks must call it.
at::Tensor train_for_several_steps(FSDPTestModel& model, const TrainOptions& options = {});

/// Like train_for_several_steps, but returns all losses in order.
std::vector<double> train_losses(FSDPTestModel& model, const TrainOptions& options);

}  // namespace tessera::testing
