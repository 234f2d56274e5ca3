#pragma once
// Scaled dot-product attention of DTensors as one call on this rank's batch items and heads. The device chooses the
// fused kernel for them.
//
// On the CPU, the op is left to ATen, whose fused kernel has a sharding rule (attention.cpp). On CUDA, ATen would
// choose among kernels with different results by properties of the whole tensor.

#include <ATen/core/Tensor.h>

#include <optional>

namespace tessera {

struct AttentionOptions {
  bool is_causal = false;
  std::optional<double> scale = std::nullopt;
  bool enable_gqa = false;
};

/// Returns whether sharded_attention() supports the arguments. It needs DTensors [batch, heads, length, width] on one
/// mesh with equal batch sizes, and no mask or one of up to 4 dims.
bool can_shard_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask);

/// Computes attention without dropout, with autograd, also for a floating mask. Keeps shards of batch items, and of
/// heads if all have equally many, and gathers the rest. The result has the query's placement, with heads inside length
/// in memory. Throws StateError in an ExplicitRedistribution scope that forbids a move.
at::Tensor sharded_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const std::optional<at::Tensor>& mask, const AttentionOptions& options);

}  // namespace tessera
