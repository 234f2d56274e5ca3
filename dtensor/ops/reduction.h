#pragma once
// What other families need of reductions.

#include <c10/core/Scalar.h>

#include <optional>

#include "dtensor/sharding_rule.h"

namespace tessera {

/// What the p-norms of shards form. nullopt: the norm is only taken of whole dims.
std::optional<Placement> pending_norm(double p);

/// The value that changes no maximum (ReduceOp::Max) or minimum of a tensor of `dtype`.
c10::Scalar neutral_of(ReduceOp op, at::ScalarType dtype);

}  // namespace tessera
