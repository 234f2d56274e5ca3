#pragma once
// Cross-entropy of a linear layer that never materializes the whole output, which saves memory for large vocabularies.
//
//   at::Tensor loss = linear_cross_entropy(features, output_layer->weight, labels);
//
// Computes outputs ("logits"), loss and gradients for some rows at a time. The tensors kept for backward have the sizes
// of `input` and `weight`. Source of the idea: Liger-Kernel's fused linear cross-entropy.
// Thread safety: like collectives, one thread per rank.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera {

struct LinearCrossEntropyOptions {
  int64_t ignore_index = -100;                   // target of rows that do not count
  std::optional<double> count = std::nullopt;    // divisor of the sum; default: the number of rows that count
  std::optional<double> softcap = std::nullopt;  // replaces logits by softcap * tanh(logits / softcap)
  int64_t rows_at_once = 0;                      // 0: chosen from the sizes
};

/// Returns the mean cross-entropy of at::linear(input, weight), a scalar in float32, or in float64 for such inputs.
///
/// `input` is [..., features] in a floating dtype, `weight` [classes, features], `target` [...] of int64, plain. On a
/// 1-D mesh, `weight` may be a DTensor under Shard(0), as ColwiseParallel shards it, or Replicate; the call is then
/// collective. All ranks of the mesh pass an equal target, and an input that is an equal plain tensor or a DTensor;
/// they get an equal plain loss. Backward needs no further memory. Throws ValueError for sizes, dtypes and placements
/// that do not fit, and for a target outside the classes; backward throws NotImplementedError for create_graph.
at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace tessera
