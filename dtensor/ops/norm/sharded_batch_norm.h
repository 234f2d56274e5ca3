#pragma once
// Local calls of batch norm in training with sharded items, which share statistics
// (dtensor/ops/norm/batch_statistics.h).

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

// Arguments of native_batch_norm_backward and batch_norm_backward: (grad_out, input, weight, running_mean, running_var,
// save_mean, save_invstd, train, eps, output_mask, ...).
constexpr size_t kSavedMean = 5;
constexpr size_t kSavedInverseDeviation = 6;
constexpr size_t kMask = 9;

/// Returns whether an axis of several ranks shards a dim of a batch norm's input other than its channels.
bool shards_items(const DTensorSpec& input);

/// Runs an op with arguments (input, weight, bias, ...) and results (output, save_mean, save_invstd, ...) that takes
/// statistics from the batch. Writes running statistics if there are any.
void sharded_batch_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan);

/// Runs either backward. If the input's gradient is wanted, those of weight and bias are replicated, otherwise partial.
void sharded_batch_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan);

}  // namespace tessera
