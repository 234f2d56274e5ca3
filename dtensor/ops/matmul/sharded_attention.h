#pragma once
// Scaled dot-product attention of DTensors as one call on this rank's batch items and heads, which are independent of
// the others: whatever fused kernels the device has choose among themselves there.
//
// On the CPU the op is left to ATen, whose fused kernel has a sharding rule (attention.cpp). On CUDA it would take one
// of several kernels by properties that are those of the whole tensor, and each has results of its own.

#include <ATen/core/Tensor.h>

#include <optional>

namespace tessera {

struct AttentionOptions {
  bool is_causal = false;
  std::optional<double> scale = std::nullopt;
  bool enable_gqa = false;
};

/// Whether sharded_attention() takes them: DTensors of one mesh, all of [batch, heads, length, width], with as many
/// batch items; a mask of up to 4 dims or none.
bool can_shard_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask);

/// Attention without dropout. What is cut along batch items, or along heads where all have as many, stays; the rest is
/// gathered. Differentiable, also in a floating mask. The result lies as the query, heads inside length in memory.
/// Throws StateError in an ExplicitRedistribution scope that forbids a move.
at::Tensor sharded_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const std::optional<at::Tensor>& mask, const AttentionOptions& options);

}  // namespace tessera
