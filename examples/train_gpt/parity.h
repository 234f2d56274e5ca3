#pragma once
// Checks that sharded training gives the results of one process.

#include "examples/train_gpt/trainer.h"

namespace tessera::examples {

struct Parity {
  double max_loss_difference = 0;
  double max_parameter_difference = 0;
};

/// Tolerances for rounding over a few tens of steps. Adam moves a parameter as far as any other even if its gradient is
/// only rounding error, so parameters differ more than losses. A step across a rounding boundary of bfloat16 costs
/// 0.4 %.
Parity allowed_parity(bool bf16);

/// Returns false also if a difference is NaN.
bool is_within(const Parity& parity, const Parity& allowed);

/// Trains again in one process, on rank 0 and its device, and compares all losses and parameters. It uses the options
/// and global batches of `trainer`, which has run. All ranks must call it, and get the same answer.
///
/// Data-parallel ranks add gradients in the same order as one process. They differ only in the norm for clipping, which
/// adds squares shard by shard, and in the mean if their number is not a power of two. Tensor-parallel ranks add the
/// terms of products in another order.
Parity compare_with_one_process(Trainer& trainer, const TrainOptions& options, const ByteData& data);

}  // namespace tessera::examples
