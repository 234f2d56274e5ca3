#pragma once
// By what gradients are divided, and when: numbers only.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "comm/backend/reduce_op.h"

namespace tessera {

struct GradientScaleOptions {
  int64_t num_ranks = 1;  // over which the gradients are reduced, replicas included
  /// Divide the sum by it; none: by num_ranks, which is the average.
  std::optional<double> divide_factor = std::nullopt;
  /// Collectives only add; the division is a step of its own.
  bool force_sum = false;
  at::ScalarType reduce_dtype = at::kFloat;
};

/// gradient = reduce(gradients / before) / after, each collective reducing with `op`.
struct GradientScale {
  double before = 1;
  ReduceOp op = ReduceOp::Avg;
  double after = 1;
  bool operator==(const GradientScale&) const = default;
};

/// A division after the reduction touches 1 / num_ranks of the elements. In float16, whose range is small, half of it
/// (the powers of two up to its square root) comes before, so that the sum does not overflow. Example: factor 24 in
/// float16 is 8 before and 3 after. As _get_gradient_divide_factors in
/// torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
GradientScale gradient_scale(const GradientScaleOptions& options);

}  // namespace tessera
