#include "fused/rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/rms_norm.h>

#include <vector>

#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dtensor.h"
#include "nn/rms_norm.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fused/fused_cases.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr double kEps = 1e-3;

Tensors norm_of(const Tensors& x) {
  return {rms_norm(x[0], x[1], {.eps = kEps})};
}

Tensors norm_of_ops(const Tensors& x) {
  return {at::rms_norm(x[0], x[1].sizes(), x[1], kEps)};
}

Tensors offset_norm_of(const Tensors& x) {
  return {rms_norm(x[0], x[1], {.eps = kEps, .weight_offset = 1})};
}

Tensors offset_norm_of_ops(const Tensors& x) {
  return {at::rms_norm(x[0], x[1].sizes(), 1 + x[1], kEps)};
}

/// Inputs: x, the weight, the residual.
Tensors sum_and_norm_of(const Tensors& x) {
  const auto result = add_rms_norm(x[0], x[2], x[1], {.eps = kEps});
  return {result.sum, result.normed};
}

Tensors sum_and_norm_of_ops(const Tensors& x) {
  const auto sum = x[0] + x[2];
  return {sum, at::rms_norm(sum, x[1].sizes(), x[1], kEps)};
}

}  // namespace

TEST_CASE("rms_norm is ATen's, with its gradients, alone and after a sum", "[fused]") {
  for (const auto& sizes :
       std::vector<std::vector<int64_t>>{{1}, {7}, {3, 33}, {2, 5, 67}, {0, 4}, {70, 3}, {2000, 1}}) {
    const auto inputs = fused_inputs({sizes, {sizes.back()}, sizes});
    expect_same_function(norm_of, norm_of_ops, {inputs[0], inputs[1]});
    expect_same_function(offset_norm_of, offset_norm_of_ops, {inputs[0], inputs[1]});
    expect_same_function(sum_and_norm_of, sum_and_norm_of_ops, inputs);
  }
  const auto inputs = fused_inputs({{9, 5}, {18}, {5, 9}});  // not contiguous
  expect_same_function(sum_and_norm_of, sum_and_norm_of_ops, {inputs[0].t(), inputs[1].slice(0, 0, 18, 2), inputs[2]});
}

TEST_CASE("rms_norm in other dtypes rounds once, and the sum of a residual first", "[fused]") {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto inputs = fused_inputs({{37, 77}, {77}, {37, 77}});
    expect_rounded(norm_of, norm_of_ops, {inputs[0], inputs[1]}, dtype);
    expect_rounded(sum_and_norm_of, sum_and_norm_of_ops, inputs, dtype, 4);
    const Tensors rounded{inputs[0].to(dtype), inputs[1].to(dtype), inputs[2].to(dtype)};
    const auto sum = rounded[0] + rounded[2];
    expect_bit_equal(sum_and_norm_of(rounded)[0], sum);
    expect_bit_equal(sum_and_norm_of(rounded)[1], norm_of({sum, rounded[1]})[0]);
  }
}

TEST_CASE("an RMSNorm is ATen's up to rounding, bit by bit if not fused", "[fused]") {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    nn::RMSNorm fused(nn::RMSNormOptions({33})), plain(nn::RMSNormOptions({33}).fused(false));
    fused->to(dtype);
    plain->to(dtype);
    const auto x = (fused_inputs({{5, 33}})[0] * 1e-3).to(dtype);  // so that the default eps matters
    const auto expected = at::rms_norm(x, {33}, plain->weight);
    expect_bit_equal(plain(x).detach(), expected.detach());
    const double ulp = dtype == at::kBFloat16 ? 1e-2 : dtype == at::kFloat ? 1e-6 : 1e-14;
    expect_close(fused(x).detach(), expected.detach(), {.rtol = ulp, .atol = ulp});
  }
}

TEST_CASE("rms_norm leaves to ATen what its kernels do not take", "[fused]") {
  const auto inputs = fused_inputs({{4, 2, 3}, {2, 3}, {3}});
  expect_same_function(norm_of, norm_of_ops, {inputs[0], inputs[1]});
  expect_same_function(sum_and_norm_of, sum_and_norm_of_ops, {inputs[0], inputs[2], inputs[1]});  // broadcast
  const auto weight = inputs[2].to(at::kFloat);
  expect_close(norm_of({inputs[0], weight})[0], norm_of_ops({inputs[0], weight})[0]);
}

TEST_CASE("rms_norm stays where its rows are", "[fused]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto inputs = fused_inputs({{2, 7, 5}, {5}, {2, 7, 5}});
    const auto weight = distribute_tensor(inputs[1], mesh, {Replicate()});
    for (const int64_t dim : {0, 1}) {
      const ExplicitRedistribution strict(/*strict=*/true);
      const auto x = distribute_tensor(inputs[0], mesh, {Shard(dim)});
      const auto residual = distribute_tensor(inputs[2], mesh, {Shard(dim)});
      for (const auto& output : sum_and_norm_of({x, weight, residual})) {
        expect_equal(to_string(placements(output)), to_string({Shard(dim)}));
      }
    }
  });
}

TEST_CASE("rms_norm runs on shards under every placement", "[fused]") {
  CHECK_NOTHROW(check_ops({
      {.name = "rms_norm", .inputs = {{{5, 3}}, {{3}}}, .call = norm_of},
      {.name = "rms_norm with an offset", .inputs = {{{1, 2, 3}}, {{3}}}, .call = offset_norm_of},
      {.name = "add_rms_norm", .inputs = {{{5, 3}}, {{3}}, {{5, 3}}}, .call = sum_and_norm_of},
  }));
}

}  // namespace tessera::testing
