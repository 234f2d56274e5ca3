#pragma once
// Helpers of reductions for other families.

#include <c10/core/Scalar.h>

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// Returns the value that does not change a maximum (ReduceOp::Max) or minimum of a tensor of `dtype`.
c10::Scalar reduction_identity(ReduceOp op, at::ScalarType dtype);

}  // namespace tessera
