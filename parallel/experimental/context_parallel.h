#pragma once
// Attention over a sequence that is cut over ranks, for sequences too long for one of them (context parallelism).
//
//   // q, k, v: DTensors [batch, heads, length, head_dim], {Shard(2)} on mesh["cp"]
//   at::Tensor y = context_parallel_attention(q, k, v, {.is_causal = true});       // as q
//
// Each rank keeps its queries and gathers the keys and values: two all-gathers in forward, two reduce-scatters of their
// gradients in backward, each of one tensor of the whole length. Activations of all other layers stay cut. A rank reads
// only the keys that its queries may see, so that with is_causal the last rank computes most. Lengths need not divide
// by the ranks. After the all-gather variant of torch/distributed/tensor/experimental's context_parallel; the scheme is
// that of A. Dubey et al.: The Llama 3 Herd of Models, 2024, section 3.3.2.
//
// Thread safety: as ops on DTensors.

#include <optional>

#include "dtensor/dtensor.h"

namespace tessera {

struct ContextAttentionOptions {
  /// Query i sees keys 0 to i, positions in the whole sequence.
  bool is_causal = false;
  /// Default: 1 / sqrt(head_dim).
  std::optional<double> scale = std::nullopt;
  /// There may be fewer heads of keys and values than of queries; each serves equally many of these.
  bool enable_gqa = false;
};

/// softmax(query key^T scale) value, placed as `query` is. Axes of the mesh may cut the length and, alike for all
/// three tensors, batch and heads; keys and values that lie otherwise are moved, and gradients of keys and values that
/// are whole already come as pending sums. Differentiable. All ranks must call.
/// Throws ValueError if a tensor is not a DTensor of four dims on one mesh or head_dim is cut; NotImplementedError for
/// grouped heads that are cut, but not into whole groups.
at::Tensor context_parallel_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      ContextAttentionOptions options = {});

}  // namespace tessera
