// What the matchers take for equal, and how they name a difference.

#include "testing/tensor_matchers.h"

#include <ATen/ops/complex.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "testing/expect.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

using Catch::Matchers::Contains;

at::Tensor floats(std::vector<float> values) {
  return at::tensor(values);
}

at::Tensor of_bits(int32_t bits) {
  return at::tensor(std::vector<int32_t>{bits}).view(at::kFloat);
}

}  // namespace

TEST_CASE("expect_bit_equal compares bits") {
  CHECK_NOTHROW(expect_bit_equal(floats({1, -0.f, 2}), floats({1, -0.f, 2})));
  CHECK_THROWS_WITH(
      expect_bit_equal(floats({1, -0.f, 2}), floats({1, 0, 2})),
      Contains("1 of 3 elements of Float[3] differ; most at flat index 1: is -0, expected 0 (the same bits)"));
  CHECK_THROWS_AS(expect_bit_equal(floats({1}), floats({1 + std::numeric_limits<float>::epsilon()})), ExpectationError);
  CHECK_NOTHROW(expect_bit_equal(of_bits(0x7fc00001), of_bits(-0x400000)));  // two NaNs
  CHECK_THROWS_AS(expect_bit_equal(of_bits(0x7fc00001), floats({1})), ExpectationError);
  for (const auto dtype : {at::kBool, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kDouble,
                           at::kFloat8_e4m3fn, at::kComplexHalf, at::kComplexDouble}) {
    CAPTURE(dtype);
    CHECK_NOTHROW(expect_bit_equal(at::zeros({2, 3}, dtype).t(), at::zeros({3, 2}, dtype)));
    CHECK_NOTHROW(expect_bit_equal(at::zeros({}, dtype), at::zeros({}, dtype)));
    CHECK_THROWS_AS(expect_bit_equal(floats({0, 1}).to(dtype), floats({0, 0}).to(dtype)), ExpectationError);
  }
}

TEST_CASE("a difference of complex numbers is told by the part that differs") {
  const auto complex = [](float real, float imaginary) {
    return at::complex(floats({0, real}), floats({0, imaginary}));
  };
  CHECK_THROWS_WITH(expect_bit_equal(complex(1, -0.f), complex(1, 0)),
                    Contains("1 of 2 elements of ComplexFloat[2] differ; most at flat index 1 (imaginary part): is -0, "
                             "expected 0"));
  CHECK_THROWS_WITH(expect_close(complex(1, 2), complex(1, 3)), Contains("(imaginary part): is 2, expected 3"));
  CHECK_THROWS_WITH(expect_close(complex(1, 2), complex(2, 2)), Contains("(real part): is 1, expected 2"));
  CHECK_NOTHROW(expect_bit_equal(complex(1, 2).conj(), complex(1, 2).conj().resolve_conj()));
}

TEST_CASE("expect_close takes zeros of two signs for equal") {
  CHECK_NOTHROW(expect_close(floats({-0.f}), floats({0})));
  CHECK_THROWS_WITH(expect_close(floats({1, 2}), floats({1, 3})),
                    Contains("1 of 2 elements of Float[2] differ; most at flat index 1: is 2, expected 3 (rtol"));
}

}  // namespace tessera
