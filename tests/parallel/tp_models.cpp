#include "tests/parallel/tp_models.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <torch/optim/adam.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"

namespace tessera::testing {

namespace {

void compare_parameters(const TrainingPair& pair, bool gradients) {
  const auto expected = pair.reference.named_parameters();
  const auto actual = pair.sharded.named_parameters();
  expect_equal(actual.size(), expected.size());
  double largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    expect_equal(actual[i].key(), expected[i].key());
    const auto& parameter = actual[i].value();
    expect_close(whole(parameter.detach()), expected[i].value().detach(), kDoubleTolerance);
    if (gradients) {
      const auto& wanted = expected[i].value().grad();
      expect_close(whole(parameter.grad()), wanted, kDoubleTolerance);
      largest = std::max(largest, wanted.abs().max().item<double>());
      if (is_dtensor(parameter)) {
        expect_equal(to_string(placements(parameter.grad())), to_string(placements(parameter)));
      }
    }
  }
  TESSERA_EXPECT(!gradients || largest > 1e-6);
}

}  // namespace

void fill_in_double(torch::nn::Module& module, uint64_t seed) {
  module.to(at::kDouble);
  fill_parameters(module, seed, /*scale=*/0.4);
}

at::Tensor make_input(uint64_t seed, at::IntArrayRef sizes) {
  return at::randn(sizes, make_generator(seed), at::kDouble);
}

void train_and_compare(const TrainingPair& pair, const at::Tensor& input) {
  torch::optim::Adam reference_optimizer(pair.reference.parameters(), 0.02);
  torch::optim::Adam optimizer(pair.sharded.parameters(), 0.02);
  for (int step = 0; step < 4; ++step) {
    const bool with_input_grad = input.is_floating_point();
    const auto expected_input = input.clone().set_requires_grad(with_input_grad);
    const auto actual_input = input.clone().set_requires_grad(with_input_grad);
    reference_optimizer.zero_grad();
    optimizer.zero_grad();
    const auto expected = pair.run_reference(expected_input);
    const auto actual = pair.run_sharded(actual_input);
    expect_close(whole(actual.detach()), expected.detach(), kDoubleTolerance);
    pair.loss(expected).backward();
    pair.loss(actual).backward();
    if (with_input_grad) {
      expect_close(actual_input.grad(), expected_input.grad(), kDoubleTolerance);
    }
    compare_parameters(pair, /*gradients=*/true);
    reference_optimizer.step();
    optimizer.step();
    compare_parameters(pair, /*gradients=*/false);
  }
}

at::Tensor whole(const at::Tensor& tensor) {
  return tensor.defined() && is_dtensor(tensor) ? full_tensor(tensor) : tensor;
}

std::string error_text(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace tessera::testing
