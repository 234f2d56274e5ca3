#pragma once
// Compares tensors in test bodies on several ranks. Failures throw ExpectationError with the location, sizes, dtypes
// and largest difference. Sizes and dtypes must be equal. NaN equals NaN, and undefined tensors are equal. DTensors are
// compared as full tensors, which all ranks must do together.

#include <ATen/core/Tensor.h>

#include <source_location>
#include <string>

namespace tessera {

/// Bounds for |actual - expected| <= atol + rtol * |expected|; defaults are torch.testing's for float32.
struct Tolerance {
  double rtol = 1.3e-6;
  double atol = 1e-5;
};

void expect_close(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance = {},
                  const std::source_location& where = std::source_location::current());

/// Compares bits; zeros of different signs differ.
void expect_bit_equal(const at::Tensor& actual, const at::Tensor& expected,
                      const std::source_location& where = std::source_location::current());

/// Describes the difference of plain tensors, or returns "".
std::string describe_difference(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance);

}  // namespace tessera
