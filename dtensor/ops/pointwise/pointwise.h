#pragma once
// Strategies of ops that work element by element, with broadcasting; other families build on them.

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// For each dim of output 0: shard it, where every operand either has that dim in full (Shard) or
/// broadcasts along it (Replicate).
Strategies pointwise_strategies(const OpCall& call);

/// The same for an op whose output 0 is not what is computed element by element: `elements` is.
Strategies pointwise_strategies(const OpCall& call, const TensorMeta& elements);

/// Output metas; for ops without a meta kernel the broadcast sizes and what the op makes of the dtypes.
std::vector<TensorMeta> pointwise_metas(const OpCall& call);

/// pointwise_strategies, and the ways in which a pending sum may stay pending:
/// `linear_operands` lists sets of operands; when exactly those are Partial and the rest replicated, the
/// outputs are Partial. add(a, b): {{0, 1}}; mul(a, b): {{0}, {1}}; div(a, b): {{0}}.
Strategies linear_strategies(const OpCall& call, const std::vector<std::vector<size_t>>& linear_operands);

}  // namespace tessera
