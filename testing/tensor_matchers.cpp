#include "testing/tensor_matchers.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isclose.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"

namespace tessera {

namespace {

std::string describe(const at::Tensor& tensor) {
  return tensor.defined() ? to_string(TensorMeta::of(tensor)) : "undefined";
}

at::Tensor plain(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? full_tensor(tensor.detach()) : tensor;
}

void expect_no_difference(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance,
                          const std::source_location& where) {
  const at::NoGradGuard no_grad;
  const auto text = describe_difference(plain(actual), plain(expected), tolerance);
  if (!text.empty()) {
    detail::expectation_failed(text, where);
  }
}

}  // namespace

std::string describe_difference(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance) {
  if (!actual.defined() || !expected.defined()) {
    return actual.defined() == expected.defined()
               ? ""
               : fmt::format("is {}, expected {}", describe(actual), describe(expected));
  }
  if (actual.sizes() != expected.sizes() || actual.scalar_type() != expected.scalar_type()) {
    return fmt::format("is {}, expected {}", describe(actual), describe(expected));
  }
  const auto wrong = at::isclose(actual, expected, tolerance.rtol, tolerance.atol, /*equal_nan=*/true).logical_not();
  const auto count = wrong.sum().item<int64_t>();
  if (count == 0) {
    return "";
  }
  const auto a = actual.to(at::kDouble).reshape({-1});
  const auto b = expected.to(at::kDouble).reshape({-1});
  const auto difference = (a - b).abs().masked_fill(wrong.reshape({-1}).logical_not(), 0).nan_to_num(1e300, 1e300);
  const auto at = difference.argmax().item<int64_t>();
  return fmt::format("{} of {} elements of {} differ; most at flat index {}: is {}, expected {} (rtol {}, atol {})",
                     count, a.numel(), describe(actual), at, a[at].item<double>(), b[at].item<double>(), tolerance.rtol,
                     tolerance.atol);
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance,
                  const std::source_location& where) {
  expect_no_difference(actual, expected, tolerance, where);
}

void expect_bit_equal(const at::Tensor& actual, const at::Tensor& expected, const std::source_location& where) {
  expect_no_difference(actual, expected, {.rtol = 0, .atol = 0}, where);
}

}  // namespace tessera
