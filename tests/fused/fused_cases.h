#pragma once
// Compares a fused op with ATen's ops: values and gradients, in every way that a program may ask for them.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tests/dtensor/op_oracle.h"

namespace tessera::testing {

using TensorsFunction = Tensors (*)(const Tensors& inputs);

/// Returns normal numbers in float64, which depend only on their place and sizes.
Tensors fused_inputs(const std::vector<std::vector<int64_t>>& sizes);

/// Compares outputs, gradients of all inputs and of each alone, gradients after recomputation, second gradients, and
/// outputs in inference and on the meta device. Inputs keep their strides.
void expect_same_function(TensorsFunction actual, TensorsFunction expected, const Tensors& inputs);

/// Compares outputs and gradients in `dtype` with those of the same numbers in float64, within `ulps` of the largest.
void expect_rounded(TensorsFunction actual, TensorsFunction expected, const Tensors& inputs, at::ScalarType dtype,
                    double ulps = 2);

}  // namespace tessera::testing
