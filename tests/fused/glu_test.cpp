#include "fused/glu.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>

#include <vector>

#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dtensor.h"
#include "fused/gelu.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fused/fused_cases.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

Tensors swiglu_of(const Tensors& x) {
  return {swiglu(x[0], x[1])};
}

Tensors composite_of(const Tensors& x) {
  return {at::silu(x[0]) * x[1]};
}

/// With one operand that depends on the other.
Tensors dependent_swiglu_of(const Tensors& x) {
  return {swiglu(x[0], x[0] * x[1])};
}

Tensors dependent_composite_of(const Tensors& x) {
  return {at::silu(x[0]) * (x[0] * x[1])};
}

Tensors geglu_of(const Tensors& x) {
  return {tanh_geglu(x[0], x[1])};
}

Tensors gelu_of_ops_times(const Tensors& x) {
  return {at::gelu(x[0], "tanh") * x[1]};
}

Tensors gelu_of(const Tensors& x) {
  return {tanh_gelu(x[0])};
}

Tensors gelu_of_ops(const Tensors& x) {
  return {at::gelu(x[0], "tanh")};
}

}  // namespace

TEST_CASE("tanh_geglu and tanh_gelu are ATen's, with their gradients", "[fused]") {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{1}, {3, 33}, {0, 4}}) {
    expect_same_function(geglu_of, gelu_of_ops_times, fused_inputs({sizes, sizes}));
    expect_same_function(gelu_of, gelu_of_ops, fused_inputs({sizes}));
  }
  expect_same_function(gelu_of, gelu_of_ops, {fused_inputs({{5, 62}})[0].t()});
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    expect_rounded(geglu_of, gelu_of_ops_times, fused_inputs({{3, 77}, {3, 77}}), dtype, 8);
    expect_rounded(gelu_of, gelu_of_ops, fused_inputs({{3, 77}}), dtype, 8);
  }
  const auto x = at::randn({64}, make_generator(1), at::kFloat) * 200;
  expect_close(tanh_gelu(x), at::gelu(x, "tanh"), {});
}

TEST_CASE("tanh_geglu and tanh_gelu run on shards under every placement", "[fused]") {
  CHECK_NOTHROW(check_ops({
      {.name = "tanh_geglu", .inputs = {{{5, 3}}, {{5, 3}}}, .call = geglu_of},
      {.name = "tanh_gelu", .inputs = {{{5, 3}}}, .call = gelu_of},
  }));
}

TEST_CASE("swiglu is silu times a tensor, with its gradients", "[fused]") {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{1}, {7}, {3, 33}, {2, 5, 67}, {0, 4}, {}}) {
    const auto inputs = fused_inputs({sizes, sizes});
    expect_same_function(swiglu_of, composite_of, inputs);
  }
  expect_same_function(dependent_swiglu_of, dependent_composite_of, fused_inputs({{3, 5}, {3, 5}}));
  // Not contiguous: halves of one projection, and a transposed tensor.
  const auto both = fused_inputs({{5, 62}})[0];
  expect_same_function(swiglu_of, composite_of, {both.narrow(1, 0, 31), both.narrow(1, 31, 31)});
  expect_same_function(swiglu_of, composite_of, {both.t(), both.t() * 2});
}

TEST_CASE("swiglu in other dtypes rounds once", "[fused]") {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    expect_rounded(swiglu_of, composite_of, fused_inputs({{3, 77}, {3, 77}}), dtype);
  }
}

TEST_CASE("swiglu of large operands", "[fused]") {
  const auto gate = at::randn({64}, make_generator(1), at::kFloat) * 200, up = at::randn({64}, make_generator(2));
  expect_close(swiglu(gate, up), at::silu(gate) * up, {});
}

TEST_CASE("swiglu leaves to ATen what its kernels do not take", "[fused]") {
  const auto row = fused_inputs({{4}})[0], matrix = fused_inputs({{3, 4}})[0];
  expect_same_function(swiglu_of, composite_of, {matrix, row});
  expect_same_function(swiglu_of, composite_of, {matrix, matrix.to(at::kFloat)});
}

TEST_CASE("swiglu stays where its operands are", "[fused]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto inputs = fused_inputs({{2, 7, 5}, {2, 7, 5}});
    const ExplicitRedistribution strict(/*strict=*/true);
    for (const int64_t dim : {0, 1, 2}) {
      const auto gate = distribute_tensor(inputs[0], mesh, {Shard(dim)});
      const auto up = distribute_tensor(inputs[1], mesh, {Shard(dim)});
      expect_equal(to_string(placements(swiglu(gate, up))), to_string({Shard(dim)}));
    }
    const auto gate = distribute_tensor(inputs[0], mesh, {Replicate()});
    const auto terms = from_local(inputs[1], mesh, {Partial()});  // linear in them
    expect_equal(to_string(placements(swiglu(gate, terms))), "(Partial(Sum))");
  });
}

TEST_CASE("swiglu runs on shards under every placement", "[fused]") {
  CHECK_NOTHROW(check_ops({
      {.name = "swiglu", .inputs = {{{5, 3}}, {{5, 3}}}, .call = swiglu_of},
      {.name = "swiglu of few items", .inputs = {{{1, 2, 3}}, {{1, 2, 3}}}, .call = swiglu_of},
  }));
}

}  // namespace tessera::testing
