// Products of few rows in InferenceMode beside at::linear in double precision.

#include "nn/hooks/inference_linear.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>

#include "nn/linear.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using detail::inference_linear, detail::multiply_few_rows;

/// The largest difference, in units of the products' sum of absolute values.
double error_of(const at::Tensor& result, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  const auto x = input.to(at::kDouble), w = weight.to(at::kDouble);
  const auto b = bias.defined() ? bias.to(at::kDouble) : bias;
  const auto size = at::linear(x.abs(), w.abs(), b.defined() ? b.abs() : b);
  return ((result.to(at::kDouble) - at::linear(x, w, b)).abs() / size).max().item<double>();
}

TEST_CASE("a product of few rows is at::linear's for every width of vectors", "[inference_linear]") {
  at::manual_seed(0);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t in : {1, 7, 16, 37, 128}) {
      for (const int64_t out : {1, 2, 5, 6, 13}) {
        for (const int64_t rows : {1, 2, 3, 4, 5, 8, 15}) {
          const auto input = at::randn({rows, in}).to(dtype), weight = at::randn({out, in}).to(dtype);
          const auto bias = rows % 2 == 0 ? at::randn({out}).to(dtype) : at::Tensor();
          for (int lanes = 4; lanes <= detail::widest_lanes(); lanes *= 2) {
            CAPTURE(dtype, in, out, rows, lanes);
            const auto result = multiply_few_rows(input, weight, bias, lanes);
            REQUIRE(result.scalar_type() == dtype);
            REQUIRE(result.sizes() == at::IntArrayRef{rows, out});
            CHECK(error_of(result, input, weight, bias) < (dtype == at::kFloat ? 1e-6 : 4e-3));
          }
        }
      }
    }
  }
}

TEST_CASE("a row's product in inference has the same bits alone and with others", "[inference_linear]") {
  at::manual_seed(1);
  const c10::InferenceMode inference;
  const auto input = at::randn({2, 8, 100}), weight = at::randn({31, 100}), bias = at::randn({31});
  const auto together = inference_linear(input, weight, bias);
  REQUIRE(together.sizes() == at::IntArrayRef{2, 8, 31});
  for (int64_t row = 0; row < 16; ++row) {
    CAPTURE(row);
    const auto alone = inference_linear(input.view({16, 100})[row], weight, bias);
    REQUIRE(alone.equal(together.view({16, 31})[row]));
  }
}

TEST_CASE("operands of any strides, sizes and dtypes have at::linear's product in inference", "[inference_linear]") {
  at::manual_seed(2);
  const c10::InferenceMode inference;
  const auto input = at::randn({40, 3, 24}), weight = at::randn({24, 10});
  for (const auto& rows :
       {input, input.narrow(0, 0, 4), input.narrow(0, 0, 2).transpose(0, 1), input.narrow(0, 0, 0)}) {
    CAPTURE(rows.sizes(), rows.strides());
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const auto x = rows.to(dtype), w = weight.t().to(dtype);
      CHECK(inference_linear(x, w, {}).allclose(at::linear(x, w), 1e-5, 1e-5));
      CHECK(inference_linear(x, w.contiguous(), {}).allclose(at::linear(x, w), 1e-5, 1e-5));
    }
  }
  CHECK_THROWS_AS(inference_linear(input, weight, {}), c10::Error);
  CHECK_THROWS_AS(inference_linear(input[0], weight.t().contiguous(), weight), c10::Error);
}

TEST_CASE("Linear takes the kernel for few rows in InferenceMode alone", "[inference_linear]") {
  at::manual_seed(3);
  nn::Linear linear(300, 20);
  const auto input = at::randn({8, 300});
  const auto plain = linear(input).detach();
  REQUIRE(plain.equal(at::linear(input, linear->weight, linear->bias)));
  const c10::InferenceMode inference;
  REQUIRE(linear(input).equal(multiply_few_rows(input, linear->weight, linear->bias, detail::widest_lanes())));
  REQUIRE(linear(input).allclose(plain, 1e-5, 1e-5));
}

}  // namespace
}  // namespace tessera
