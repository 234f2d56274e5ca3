#include "testing/tensor_matchers.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isclose.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/view_as_real.h>

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

/// Returns real numbers; a complex number becomes two, in an additional last dim.
at::Tensor as_real(const at::Tensor& tensor) {
  const auto resolved = tensor.resolve_conj().resolve_neg();
  return resolved.is_complex() ? at::view_as_real(resolved) : resolved;
}

/// Returns the bits of real numbers.
at::Tensor bits(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(at::kByte);
    case 2:
      return tensor.view(at::kShort);
    case 4:
      return tensor.view(at::kInt);
    default:
      return tensor.view(at::kLong);
  }
}

at::Tensor is_nan(const at::Tensor& tensor) {
  return at::isnan(tensor.is_floating_point() ? tensor.to(at::kDouble) : tensor);
}

/// Compares bits; NaNs are equal regardless of their bits.
at::Tensor same_bits(const at::Tensor& actual, const at::Tensor& expected) {
  const auto a = as_real(actual), b = as_real(expected);
  return bits(a).eq(bits(b)).logical_or(is_nan(a).logical_and(is_nan(b)));
}

/// Returns "" if kind and sizes are equal.
std::string describe_kind_difference(const at::Tensor& actual, const at::Tensor& expected) {
  const bool are_defined = actual.defined() && expected.defined();
  const bool match = are_defined ? actual.sizes() == expected.sizes() && actual.scalar_type() == expected.scalar_type()
                                 : actual.defined() == expected.defined();
  return match ? "" : fmt::format("is {}, expected {}", describe(actual), describe(expected));
}

/// `wrong` has one flag per element, or per real number for complex ones. Returns "" if none is set.
std::string describe_wrong(const at::Tensor& wrong, const at::Tensor& actual, const at::Tensor& expected,
                           std::string_view allowed) {
  const auto a = as_real(actual).to(at::kDouble), b = as_real(expected).to(at::kDouble);
  const bool is_by_part = wrong.dim() == a.dim();
  const auto count = (actual.is_complex() && is_by_part ? wrong.any(-1) : wrong).sum().item<int64_t>();
  if (count == 0) {
    return "";
  }
  const auto places = is_by_part ? wrong : wrong.unsqueeze(-1).expand_as(a);
  const auto difference = (a - b).abs().nan_to_num(1e300, 1e300).masked_fill(places.logical_not(), -1);
  const auto at = difference.argmax().item<int64_t>();
  const char* part = !actual.is_complex() ? "" : at % 2 == 0 ? " (real part)" : " (imaginary part)";
  return fmt::format("{} of {} elements of {} differ; most at flat index {}{}: is {}, expected {} ({})", count,
                     actual.numel(), describe(actual), actual.is_complex() ? at / 2 : at, part,
                     a.reshape({-1})[at].item<double>(), b.reshape({-1})[at].item<double>(), allowed);
}

std::string describe_bit_difference(const at::Tensor& actual, const at::Tensor& expected) {
  const auto kinds = describe_kind_difference(actual, expected);
  if (!kinds.empty() || !actual.defined()) {
    return kinds;
  }
  return describe_wrong(same_bits(actual, expected).logical_not(), actual, expected, "the same bits");
}

void expect_no_difference(const std::string& text, const std::source_location& where) {
  if (!text.empty()) {
    detail::expectation_failed(text, where);
  }
}

}  // namespace

std::string describe_difference(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance) {
  const auto kinds = describe_kind_difference(actual, expected);
  if (!kinds.empty() || !actual.defined()) {
    return kinds;
  }
  const auto wrong = at::isclose(actual, expected, tolerance.rtol, tolerance.atol, /*equal_nan=*/true).logical_not();
  return describe_wrong(wrong, actual, expected, fmt::format("rtol {}, atol {}", tolerance.rtol, tolerance.atol));
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance,
                  const std::source_location& where) {
  const at::NoGradGuard no_grad;
  expect_no_difference(describe_difference(plain(actual), plain(expected), tolerance), where);
}

void expect_bit_equal(const at::Tensor& actual, const at::Tensor& expected, const std::source_location& where) {
  const at::NoGradGuard no_grad;
  expect_no_difference(describe_bit_difference(plain(actual), plain(expected)), where);
}

}  // namespace tessera
