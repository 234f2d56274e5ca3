#pragma once
// What other families need of reductions.

#include <c10/core/Scalar.h>

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// The value that changes no maximum (ReduceOp::Max) or minimum of a tensor of `dtype`.
c10::Scalar neutral_of(ReduceOp op, at::ScalarType dtype);

}  // namespace tessera
