#pragma once
// Does sharded training give what one process gives?

#include "examples/train_gpt/trainer.h"

namespace tessera::examples {

struct Parity {
  double max_loss_difference = 0;
  double max_parameter_difference = 0;
};

/// What rounding may do in some tens of steps. Adam moves a parameter whose gradient is all rounding error as far as
/// any other, so that parameters differ more than losses; a step across a rounding boundary of bfloat16 costs 0.4 %.
Parity allowed_parity(bool bf16);

/// False also where a difference is not a number.
bool is_within(const Parity& parity, const Parity& allowed);

/// Trains once more in one process, on rank 0 and its device, with the options and the global batches of `trainer`,
/// which has been run, and compares all losses and all parameters. Every rank calls it and gets the same answer.
///
/// Data-parallel ranks add up gradients in the same order as one process. They differ only in the norm for clipping,
/// whose squares are summed up shard by shard, and in the mean where their number is no power of two. Tensor-parallel
/// ranks add up the terms of products in another order.
Parity compare_with_one_process(Trainer& trainer, const TrainOptions& options, const ByteData& data);

}  // namespace tessera::examples
