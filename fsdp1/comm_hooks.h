#pragma once
// Communication hooks: functions of one's own by which the units of a FullyShardedDataParallel reduce their gradients.
//
//   FullyShardedDataParallel model(Gpt(config), {.auto_wrap_policy = module_wrap_policy<BlockImpl>()});
//   model.register_comm_hook(bf16_compress_hook(DefaultState(default_group())));      // half the bytes
//
// One's own, which averages over two ranks as the engine would:
//
//   model.register_comm_hook({.run = [](const at::Tensor& full_flat_grad, const at::Tensor& output) {
//     full_flat_grad.div_(2);
//     if (output.defined()) {
//       reduce_scatter(output, full_flat_grad, ReduceOp::Sum, default_group());        // FULL_SHARD, SHARD_GRAD_OP
//     } else {
//       all_reduce(full_flat_grad, ReduceOp::Sum, default_group());                    // NO_SHARD
//     }
//   }});
//
// Thread safety: a hook is called by the thread that runs the rank's backward.
// After torch/distributed/algorithms/_comm_hooks/default_hooks.py. What is `state` there is what a function captures.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "comm/process_group.h"

namespace tessera {

struct CommHook {
  /// Reduces the gradients of one unit (those of units below it come in calls of their own) over the ranks, and returns
  /// when that is done. It divides as it wishes: the engine does not, neither before nor after.
  ///
  /// `full_flat_grad`: this rank's gradients, flat, in the unit's reduce dtype; it may be overwritten. Of a sharded
  /// unit it is as many equal parts as there are ranks, and the result for this rank's part goes to `output`, which has
  /// the size of a part. Of a unit that is not sharded (NO_SHARD, or one rank) `output` is undefined, and the result
  /// goes to `full_flat_grad`. Where parts are padded, the padding is 0.
  std::function<void(const at::Tensor& full_flat_grad, const at::Tensor& output)> run;
  /// Whether it sends a lower precision than it is given; see FSDP::low_precision_hook_enabled.
  bool is_low_precision = false;
};

/// Over which ranks, and by what gradients are divided before and after: two powers of two as alike as can be where the
/// number of ranks is one, so that neither sums overflow nor small gradients vanish. Together they make the average.
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

/// grad = its average over the ranks, in place.
void allreduce_hook(const DefaultState& state, const at::Tensor& grad);
/// output = this rank's part of the average; `grad` is overwritten.
void reduce_scatter_hook(const DefaultState& state, const at::Tensor& grad, const at::Tensor& output);

/// The hook that does as no hook does: one of the two above.
CommHook default_hook(DefaultState state);
/// As default_hook, but what is sent is in float16 or bfloat16, and so is the sum. The result is cast back.
CommHook fp16_compress_hook(DefaultState state);
CommHook bf16_compress_hook(DefaultState state);

}  // namespace tessera
