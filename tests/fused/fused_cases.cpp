#include "tests/fused/fused_cases.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>

#include "activation_checkpoint/checkpoint.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr Tolerance kTolerance{.rtol = 1e-12, .atol = 1e-12};

/// Leaves with the strides of `inputs`.
Tensors leaves_of(const Tensors& inputs) {
  Tensors leaves;
  for (const auto& input : inputs) {
    leaves.push_back(input.detach().set_requires_grad(true));
  }
  return leaves;
}

/// A sum of all elements with different weights.
at::Tensor weighed(const at::Tensor& output) {
  const auto weights = at::arange(output.numel(), at::TensorOptions().dtype(output.scalar_type())).view(output.sizes());
  return (output * (weights * 0.37).cos()).sum();
}

/// A number whose gradients with respect to the outputs differ from element to element.
at::Tensor loss_of(const Tensors& outputs) {
  at::Tensor loss = weighed(outputs.at(0));
  for (size_t i = 1; i < outputs.size(); ++i) {
    loss = loss + 2 * weighed(outputs[i]);
  }
  return loss;
}

void expect_all_close(const Tensors& actual, const Tensors& expected, Tolerance tolerance = kTolerance) {
  expect_equal(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    expect_close(actual[i].detach(), expected[i].detach(), tolerance);
  }
}

Tensors gradients(TensorsFunction function, const Tensors& inputs) {
  const auto leaves = leaves_of(inputs);
  return torch::autograd::grad({loss_of(function(leaves))}, leaves);
}

void expect_gradient_of_each_alone(TensorsFunction actual, const Tensors& inputs, const Tensors& expected) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto some = inputs;
    some[i] = inputs[i].detach().set_requires_grad(true);
    expect_close(torch::autograd::grad({loss_of(actual(some))}, {some[i]})[0], expected[i], kTolerance);
  }
}

/// Where an op has several outputs, of which a program may use one.
void expect_gradients_of_one_output(TensorsFunction actual, TensorsFunction expected, const Tensors& inputs) {
  const auto of = [&](TensorsFunction function, size_t output) {
    const auto leaves = leaves_of(inputs);
    return torch::autograd::grad({weighed(function(leaves)[output])}, leaves, {}, /*retain_graph=*/std::nullopt,
                                 /*create_graph=*/false, /*allow_unused=*/true);
  };
  for (size_t output = 0; output < expected(inputs).size(); ++output) {
    const auto found = of(actual, output), wanted = of(expected, output);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto as_zeros = [&](const at::Tensor& grad) { return grad.defined() ? grad : inputs[i] * 0; };
      expect_close(as_zeros(found[i]), as_zeros(wanted[i]), kTolerance);
    }
  }
}

Tensors squares_of(const Tensors& tensors) {
  Tensors squares;
  for (const auto& tensor : tensors) {
    squares.push_back(tensor.square());
  }
  return squares;
}

Tensors second_gradients(TensorsFunction function, const Tensors& inputs) {
  const auto leaves = leaves_of(inputs);
  const auto loss = loss_of(squares_of(function(leaves)));  // whose gradient depends on linear ops' operands too
  const auto first = torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/std::nullopt, /*create_graph=*/true);
  return torch::autograd::grad({loss_of(squares_of(first))}, leaves, {}, /*retain_graph=*/std::nullopt,
                               /*create_graph=*/false,
                               /*allow_unused=*/true);
}

Tensors recomputed_gradients(TensorsFunction function, const Tensors& inputs) {
  const auto leaves = leaves_of(inputs);
  const auto outputs = checkpoint([function](const Tensors& x) { return function(x); }, leaves);
  return torch::autograd::grad({loss_of(outputs)}, leaves);
}

void expect_sizes_on_meta(TensorsFunction function, const Tensors& inputs, const Tensors& expected) {
  Tensors without_data;
  for (const auto& input : inputs) {
    without_data.push_back(input.detach().to(at::kMeta));
  }
  const auto outputs = function(without_data);
  for (size_t i = 0; i < outputs.size(); ++i) {
    CHECK(outputs[i].is_meta());
    CHECK(outputs[i].sizes() == expected[i].sizes());
    CHECK(outputs[i].scalar_type() == expected[i].scalar_type());
  }
}

}  // namespace

Tensors fused_inputs(const std::vector<std::vector<int64_t>>& sizes) {
  Tensors inputs;
  for (size_t i = 0; i < sizes.size(); ++i) {
    inputs.push_back(at::randn(sizes[i], make_generator(i + 1), at::TensorOptions().dtype(at::kDouble)));
  }
  return inputs;
}

void expect_same_function(TensorsFunction actual, TensorsFunction expected, const Tensors& inputs) {
  const auto outputs = expected(inputs);
  expect_all_close(actual(inputs), outputs);
  {
    const c10::InferenceMode inference;
    expect_all_close(actual(inputs), outputs);
  }
  expect_sizes_on_meta(actual, inputs, outputs);
  const auto wanted = gradients(expected, inputs);
  expect_all_close(gradients(actual, inputs), wanted);
  expect_all_close(recomputed_gradients(actual, inputs), wanted);
  expect_gradient_of_each_alone(actual, inputs, wanted);
  expect_gradients_of_one_output(actual, expected, inputs);
  expect_all_close(second_gradients(actual, inputs), second_gradients(expected, inputs));
}

void expect_rounded(TensorsFunction actual, TensorsFunction expected, const Tensors& inputs, at::ScalarType dtype,
                    double ulps) {
  Tensors rounded, wide;
  for (const auto& input : inputs) {
    rounded.push_back(input.to(dtype));
    wide.push_back(rounded.back().to(at::kDouble));
  }
  const double ulp = dtype == at::kBFloat16 ? 1.0 / 128 : dtype == at::kHalf ? 1.0 / 1024 : 1.2e-7;
  const auto compare = [&](const Tensors& narrow, const Tensors& precise) {
    for (size_t i = 0; i < narrow.size(); ++i) {
      CHECK(narrow[i].scalar_type() == dtype);
      const double largest = precise[i].abs().max().item<double>();
      expect_close(narrow[i].detach().to(at::kDouble), precise[i].detach(), {.rtol = 0, .atol = ulps * ulp * largest});
    }
  };
  compare(actual(rounded), expected(wide));
  const auto grads = [&](TensorsFunction function, const Tensors& x) {
    const auto leaves = leaves_of(x);
    Tensors terms;
    for (const auto& output : function(leaves)) {
      terms.push_back(output.sum());
    }
    return torch::autograd::grad(terms, leaves);
  };
  compare(grads(actual, rounded), grads(expected, wide));
}

}  // namespace tessera::testing
