#pragma once
// Communication hooks, which reduce gradients of a FullyShardedDataParallel model instead of the engine:
//
//   model.register_comm_hook(bf16_compress_hook(DefaultState(default_group())));  // half the bytes
//
// Thread safety: hooks run in the thread that runs backward. Source: torch/distributed/algorithms/_comm_hooks.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "comm/process_group.h"

namespace tessera {

struct CommHook {
  /// Reduces (and divides) this rank's gradients of one unit, without inner ones, and returns when done.
  /// `full_flat_grad` is in the reduce dtype and may be overwritten. If the unit is sharded, it has an equal,
  /// zero-padded chunk per rank, and `output` receives this rank's result. Otherwise `output` is undefined, and
  /// `full_flat_grad` receives it.
  std::function<void(const at::Tensor& full_flat_grad, const at::Tensor& output)> run;
  bool is_low_precision = false;  // see FSDP::low_precision_hook_enabled
};

/// Ranks to average over, with factors to divide by before and after the sum to avoid overflow and underflow.
class DefaultState {
 public:
  explicit DefaultState(const ProcessGroupPtr& group);

  const ProcessGroupPtr& process_group() const { return *group_; }
  double gradient_predivide_factor() const { return predivide_factor_; }
  double gradient_postdivide_factor() const { return postdivide_factor_; }

 private:
  std::shared_ptr<const ProcessGroupPtr> group_;
  double predivide_factor_ = 1;
  double postdivide_factor_ = 1;
};

void allreduce_hook(const DefaultState& state, const at::Tensor& grad);  // averages in place
/// Stores this rank's chunk of the average in `output` and overwrites `grad`.
void reduce_scatter_hook(const DefaultState& state, const at::Tensor& grad, const at::Tensor& output);

CommHook default_hook(DefaultState state);  // acts like the engine
/// Like default_hook, but communicates and sums in float16 or bfloat16.
CommHook fp16_compress_hook(DefaultState state);
CommHook bf16_compress_hook(DefaultState state);

}  // namespace tessera
