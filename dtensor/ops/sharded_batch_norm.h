#pragma once
// Batch norm in training where the items of the batch are cut: local calls that exchange a few numbers a channel, and
// leave the batch where it is. All ranks get the statistics of the whole batch, to the same bits.
//
// With 2 ranks that hold the values [1, 3] (rank 0) and [8] (rank 1) of a channel, each sends its count, mean and sum
// of squared deviations, (2, 2, 2) and (1, 8, 0). Both then know the mean 4 and the sum 2 + 0 + 2 (2 - 4)^2 +
// 1 (8 - 4)^2 = 26, and so the variance 26 / 3. A rank without items sends zeros.
//
// The statistics are put together as T. F. Chan, G. H. Golub, R. J. LeVeque do (Updating Formulae and a Pairwise
// Algorithm for Computing Sample Variances, 1979), which loses no digits to a large mean. Gradients are those of S.
// Ioffe and C. Szegedy (arXiv:1502.03167); each of their two sums goes over all ranks.

#include "dtensor/sharding_rule.h"

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
