#pragma once
// Cross-entropy of a linear layer's outputs that are never whole, so that a large vocabulary takes little memory.
//
//   at::Tensor loss = linear_cross_entropy(features, output_layer->weight, labels);
//
// Outputs ("logits") are computed for some rows at a time, and with the loss already its gradients. What stays for
// backward has the sizes of `input` and `weight`. Source of the idea: Liger-Kernel's fused linear cross-entropy.
// Thread safety: like collectives, one thread per rank.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera {

struct LinearCrossEntropyOptions {
  int64_t ignore_index = -100;                   // target of rows that do not count
  std::optional<double> count = std::nullopt;    // divides the sum over rows; nullopt: by the rows that count
  std::optional<double> softcap = std::nullopt;  // logits become softcap * tanh(logits / softcap)
  int64_t rows_at_once = 0;                      // 0: chosen by the sizes
};

/// Returns the mean cross-entropy of at::linear(input, weight), a scalar in float32, or in float64 for such inputs.
///
/// `input` is [..., features] in a floating dtype, `weight` [classes, features], `target` [...] of int64, plain. On a
/// 1-D mesh, `weight` may be a DTensor under Shard(0), as ColwiseParallel shards it, or Replicate. Ranks of the mesh
/// then have the same target, and an input that is plain and the same, or a DTensor; the loss is plain and the same.
/// Collective in that case. Backward needs no further memory and cannot create a graph (NotImplementedError). Throws
/// ValueError for sizes, dtypes and placements that do not fit, and for a target of no class.
at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
                                const LinearCrossEntropyOptions& options = {});

}  // namespace tessera
