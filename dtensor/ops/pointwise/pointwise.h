#pragma once
// Strategies of elementwise ops with broadcasting, for use by other families too.

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// Returns a strategy for each dim of output 0. Operands that have it in full are sharded, and those that broadcast
/// replicated.
Strategies pointwise_strategies(const OpCall& call);

/// Like the above, for an op with elementwise result `elements` instead of output 0.
Strategies pointwise_strategies(const OpCall& call, const TensorMeta& elements);

/// Returns output metas; for ops without a meta kernel, broadcast sizes and the op's dtypes.
std::vector<TensorMeta> pointwise_metas(const OpCall& call);

/// Returns pointwise_strategies, and ways to keep partial sums. `linear_operands` lists sets of operands: if exactly
/// those are Partial and the rest replicated, outputs are Partial. add(a, b): {{0, 1}}; mul(a, b): {{0}, {1}}; div(a,
/// b): {{0}}.
Strategies linear_strategies(const OpCall& call, const std::vector<std::vector<size_t>>& linear_operands);

}  // namespace tessera
