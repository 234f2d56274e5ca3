// Composite ops, and gradients, for which ATen makes plain tensors of sizes and numbers.

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/affine_grid_generator.h>
#include <ATen/ops/combinations.h>
#include <ATen/ops/ctc_loss.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/cummin.h>
#include <ATen/ops/diagonal_scatter.h>
#include <ATen/ops/glu.h>
#include <ATen/ops/linalg_matrix_power.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pdist.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/select_scatter.h>
#include <ATen/ops/slice_scatter.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/trace.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

using namespace tessera;

namespace {

/// A plain tensor as it goes with `other`.
at::Tensor beside(const at::Tensor& plain, const at::Tensor& other) {
  const auto moved = plain.to(other.device());
  return is_dtensor(other) ? from_local(moved, device_mesh(other), Placements(placements(other).size(), Replicate()))
                           : moved;
}

at::Tensor numbers(std::vector<int64_t> values) {
  return at::tensor(values, at::kLong);
}

}  // namespace

TEST_CASE("ops that make masks, indices and bounds", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "one_hot",
       .inputs = {indices({5, 3}, 4)},
       .call = [](const Tensors& x) -> Tensors {
         return {at::one_hot(x[0], 6), at::one_hot(x[0])};
       }},
      {.name = "combinations",
       .inputs = {{{5}}},
       .call = [](const Tensors& x) -> Tensors { return {at::combinations(x[0], 2)}; }},
      {.name = "matrix powers",
       .inputs = {{{2, 3, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::linalg_matrix_power(x[0], 0), at::linalg_matrix_power(x[0], 3)};
       }},
      {.name = "causal attention without heads",
       .inputs = {{{4, 3, 5}}, {{4, 3, 5}}, {{4, 3, 5}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0, /*is_causal=*/true)};
       }},
  }));
}

TEST_CASE("connectionist temporal classification", "[dtensor][ops]") {
  const auto loss = [](const char* name, auto call) {
    return OpCase{.name = name,
                  .inputs = {{{6, 2, 5}}, indices({2, 3}, 4)},
                  .call = [call](const Tensors& x) -> Tensors { return {call(x[0].log_softmax(2), x[1] + 1)}; },
                  .cpu_only = true};
  };
  using T = const at::Tensor&;
  CHECK_NOTHROW(check_ops({
      loss("lengths as numbers",
           [](T probs, T targets) {
             return at::ctc_loss(probs, targets, at::IntArrayRef{6, 5}, at::IntArrayRef{3, 2});
           }),
      loss("lengths as plain tensors",
           [](T probs, T targets) {
             return at::ctc_loss(probs, targets, numbers({6, 5}), numbers({3, 2}));
           }),
      loss("lengths as DTensors",
           [](T probs, T targets) {
             return at::ctc_loss(probs, targets, beside(numbers({6, 5}), probs), beside(numbers({3, 2}), probs), 0,
                                 at::Reduction::Sum);
           }),
  }));
}

TEST_CASE("gradients whose formulas make tensors", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "select_scatter, diagonal_scatter",
       .inputs = {{{4, 4}}, {{4}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::select_scatter(x[0], x[1], 0, 2), at::select_scatter(x[0], x[1], 1, 0),
                 at::diagonal_scatter(x[0], x[1])};
       }},
      {.name = "slice_scatter",
       .inputs = {{{4, 4}}, {{2, 4}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::slice_scatter(x[0], x[1], 0, 1, 3), at::slice_scatter(x[0], x[1].t(), 1, 0, 4, 2)};
       }},
      {.name = "put",
       .inputs = {{{4, 4}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {x[0].put(beside(numbers({1, 7, 15}), x[0]), x[1])};
       }},
      {.name = "cummax, cummin",
       .inputs = {{{5, 4}}},
       .call = [](const Tensors& x) -> Tensors {
         return {std::get<0>(at::cummax(x[0], 0)), std::get<0>(at::cummin(x[0], 1))};
       }},
      {.name = "trace", .inputs = {{{5, 4}}}, .call = [](const Tensors& x) -> Tensors { return {at::trace(x[0])}; }},
      {.name = "affine_grid",
       .inputs = {{{2, 2, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::affine_grid_generator(x[0], {2, 3, 4, 5}, /*align_corners=*/false)};
       }},
  }));
}

TEST_CASE("gradients of gradients whose formulas make tensors", "[dtensor][ops]") {
  const auto gradient_of = [](const char* name, auto function) {
    return OpCase{.name = name, .inputs = {{{5, 4}}}, .call = [function](const Tensors& x) -> Tensors {
                    const auto result = function(x[0]).square().sum();
                    return torch::autograd::grad({result}, {x[0]}, {}, /*retain_graph=*/true, /*create_graph=*/true);
                  }};
  };
  using T = const at::Tensor&;
  CHECK_NOTHROW(check_ops({
      gradient_of("glu", [](T x) { return at::glu(x, 1); }),
      gradient_of("pdist", [](T x) { return at::pdist(x); }),
  }));
}

TEST_CASE("plain tensors of a program's own are refused in a backward too", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({4}), mesh, {Shard(0)}).requires_grad_();
    x.register_hook([](const at::Tensor& grad) { return grad * at::ones({4}); });
    expect_throws<ValueError>([&] { x.mul(2).sum().backward(); },
                              "aten::mul.Tensor: DTensors and plain tensors are mixed");
  });
}

TEST_CASE("classes that are none are refused on every rank", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto classes = distribute_tensor(numbers({0, 1, 4}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { at::one_hot(classes, 4); }, "classes from 0 to 4, of 4");
    expect_throws<ValueError>([&] { at::one_hot(classes - 1, 4); }, "classes from -1 to 3, of 4");
    expect_throws<ValueError>([&] { at::one_hot(classes, 0); }, "0 classes for 3 elements");
    // What a user made may differ between ranks.
    const auto query = distribute_tensor(at::zeros({2, 3, 4}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { at::scaled_dot_product_attention(query, query, at::zeros({2, 3, 4})); }, "mixed");
  });
}
