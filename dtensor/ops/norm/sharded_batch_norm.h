#pragma once
// Batch norm in training where the items of the batch are cut: local calls that share their statistics
// (dtensor/ops/norm/batch_statistics.h), and leave the batch where it is.

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

// Arguments of native_batch_norm_backward and batch_norm_backward: (grad_out, input, weight, running_mean, running_var,
// save_mean, save_invstd, train, eps, output_mask, ...).
constexpr size_t kSavedMean = 5;
constexpr size_t kSavedInverseDeviation = 6;
constexpr size_t kMask = 9;

/// Whether any axis of several ranks cuts a dim of a batch norm's input other than its channels.
bool cuts_items(const DTensorSpec& input);

/// Of any op with arguments (input, weight, bias, ...) and results (output, save_mean, save_invstd, ...), which takes
/// its statistics from the batch. Writes the running statistics, if there are any.
void sharded_batch_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan);

/// Of both backwards. If the input's gradient is wanted, those of weight and bias are whole on every rank, else they
/// are terms of a sum.
void sharded_batch_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan);

}  // namespace tessera
