#pragma once
// Root mean square normalization of contiguous rows on the CPU. Sums are in float32, or in float64 for float64 rows.

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "fused/cpu/instruction_set.h"

namespace tessera::fused {

/// Rows [rows, features] of one dtype. Computes `sum` = x + residual unless `residual` is null, then `normed` = x (or
/// sum) * rstd * (weight + weight_offset).
struct NormOperands {
  at::ScalarType dtype;
  int64_t features;
  double eps, weight_offset;
  const void* x;
  const void* residual;
  const void* weight;  // [features]
  void* sum;
  void* normed;
  void* rstd;  // [rows], in the dtype of sums
};

/// Operands of the backward. `grad_sum`, which is added to the gradient of x, and `grad_weight` may be null.
struct NormBackwardOperands {
  at::ScalarType dtype;
  int64_t features;
  double weight_offset;
  const void* grad;
  const void* grad_sum;
  const void* x;
  const void* weight;
  const void* rstd;
  void* grad_x;
};

struct NormKernels {
  /// Computes rows `begin` to `end`.
  void (*forward)(const NormOperands& of, int64_t begin, int64_t end);
  /// Does the same for backward, and adds these rows' part of the weight's gradient to `grad_weight` [features], in the
  /// dtype of sums.
  void (*backward)(const NormBackwardOperands& of, int64_t begin, int64_t end, void* grad_weight);
};

const NormKernels& norm_kernels(Baseline);
const NormKernels& norm_kernels(Avx2);
const NormKernels& norm_kernels(Avx512);

}  // namespace tessera::fused
