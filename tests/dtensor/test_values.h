#pragma once
// Numbers and tensors that tests of DTensors have in common.

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <c10/util/accumulate.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace tessera {

inline constexpr double kInf = std::numeric_limits<double>::infinity();

/// 0, 1, 2, ... in floats.
inline at::Tensor ramp(const std::vector<int64_t>& sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).reshape(sizes);
}

/// 0.25, 0.5, 0.75, ... in doubles.
inline at::Tensor quarters(const std::vector<int64_t>& sizes) {
  return at::arange(1, c10::multiply_integers(sizes) + 1, at::kDouble).div(4).reshape(sizes);
}

}  // namespace tessera
