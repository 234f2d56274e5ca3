#pragma once
// Attention over a sequence that is sharded across ranks (context parallelism). Thread safety: like ops on DTensors.
// Source: torch.distributed.tensor.experimental's context_parallel; A. Dubey et al., The Llama 3 Herd of Models, 2024.

#include <optional>

#include "dtensor/dtensor.h"

namespace tessera {

struct ContextAttentionOptions {
  bool is_causal = false;                      // query i sees keys 0 to i
  std::optional<double> scale = std::nullopt;  // default: 1 / sqrt(head_dim)
  bool enable_gqa = false;                     // fewer heads of keys and values than of queries
};

/// Returns softmax(query key^T scale) value, placed like `query`; all are [batch, heads, length, head_dim]. Throws
/// ValueError if sizes or meshes differ or head_dim is sharded, and NotImplementedError if shards split a GQA group.
at::Tensor context_parallel_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      ContextAttentionOptions options = {});

}  // namespace tessera
