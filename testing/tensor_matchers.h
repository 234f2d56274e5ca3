#pragma once
// Comparisons of tensors for test bodies on several ranks. One that fails throws ExpectationError with the place,
// the sizes and dtypes, the largest difference and where it is.
//
//   expect_close(full_tensor(y), reference);                     // float32 tolerance of torch.testing
//   expect_close(loss, reference, {.rtol = 1e-4, .atol = 1e-4});
//   expect_bit_equal(grad, reference_grad);
//
// Sizes and dtypes must be equal; NaN equals NaN, whatever its bits, and an undefined tensor equals another one. A
// DTensor is compared by its full tensor (a collective).

#include <ATen/core/Tensor.h>

#include <source_location>
#include <string>

namespace tessera {

/// |actual - expected| <= atol + rtol * |expected|, for each element.
struct Tolerance {
  double rtol = 1.3e-6;
  double atol = 1e-5;
};

void expect_close(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance = {},
                  const std::source_location& where = std::source_location::current());

/// The same bits: zeros of two signs differ.
void expect_bit_equal(const at::Tensor& actual, const at::Tensor& expected,
                      const std::source_location& where = std::source_location::current());

/// What differs, in words; empty if nothing does. Plain tensors only.
std::string describe_difference(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance);

}  // namespace tessera
