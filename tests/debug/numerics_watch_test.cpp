#include "debug/numerics_watch.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <cmath>
#include <limits>

#include "comm/process_group.h"
#include "device_mesh/device_mesh.h"
#include "fully_shard/fully_shard.h"
#include "nn/hooks/hook_point.h"
#include "nn/modules.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Three units and the model's own.
nn::Sequential sharded_model() {
  nn::Sequential model(nn::Linear(3, 5), nn::Linear(5, 5), nn::Linear(5, 2));
  const auto mesh = init_device_mesh(at::kCPU, {get_world_size()}, {"dp"});
  for (const auto& layer : model->children()) {
    fully_shard(*layer, {.mesh = mesh});
  }
  fully_shard(model, {.mesh = mesh});
  return model;
}

void backward(nn::Sequential& model, double input = 1) {
  model->zero_grad();
  model->forward(at::full({4, 3}, input)).sum().backward();
}

/// Replaces outputs of a module where `is_faulty`, before the watch sees them.
ScopedHook replace_output(nn::Sequential& model, const char* name, std::function<void(at::Tensor&)> fault) {
  auto& point = hook_point(*model->named_children()[name], "test");
  return ScopedHook(
      point.register_forward_hook([fault](HookPoint&, TensorRefs outputs) { fault(*outputs[0]); }, HookOrder::Prepend));
}

std::string found_text(NumericsWatch& watch, int64_t step) {
  const auto found = watch.check(step);
  return found ? to_string(*found) : "";
}

}  // namespace

TEST_CASE("numbers of outputs and gradients are those of the tensors") {
  nn::Sequential model(nn::Linear(3, 2), nn::ReLU());
  NumericsWatch watch(*model, {.max_abs = true});
  const auto input = at::ones({4, 3});
  const auto output = model->forward(input);
  output.sum().backward();
  {
    const at::NoGradGuard no_grad;
    model->forward(at::full({4, 3}, kInfinity));  // a validation is not watched
  }
  expect_equal(found_text(watch, 1), std::string());
  const auto number_of = [&](const std::string& name, WatchedTensor kind) {
    for (const auto& numbers : watch.numbers()) {
      if (numbers.name == name && numbers.kind == kind) {
        return numbers;
      }
    }
    throw ExpectationError("no numbers of " + name);
  };
  const auto near = [](double actual, double expected) {
    expect_equal(std::abs(actual - expected) <= 1e-5 * expected, true);
  };
  const auto of_output = number_of("1", WatchedTensor::Output);
  near(of_output.norm, output.norm().item<double>());
  near(of_output.max_abs.value(), output.abs().max().item<double>());
  near(number_of("model", WatchedTensor::OutputGradient).norm, std::sqrt(8.0));
  const auto gradient = model->named_parameters()["0.weight"].grad();
  near(number_of("0.weight", WatchedTensor::ParameterGradient).norm, gradient.norm().item<double>());
  near(number_of("0.weight", WatchedTensor::ParameterGradient).max_abs.value(), gradient.abs().max().item<double>());
  expect_equal(found_text(watch, 2), std::string());
}

TEST_CASE("the first NaN is named on all ranks, with its rank, module and step") {
  run_ranks(3, [](int rank) {
    auto model = sharded_model();
    NumericsWatch watch(*model);
    backward(model);
    expect_equal(found_text(watch, 1), std::string());
    {
      const auto fault =
          replace_output(model, "1", [&](at::Tensor& output) { output = rank == 1 ? output * std::nan("") : output; });
      backward(model);
      expect_equal(found_text(watch, 2), std::string("step 2, rank 1: the output of '1' has NaN"));
    }
    {
      const auto fault =
          replace_output(model, "2", [&](at::Tensor& output) { output = rank == 2 ? output + kInfinity : output; });
      backward(model);
      expect_equal(found_text(watch, 3), std::string("step 3, rank 2: the output of '2' has infinity"));
    }
    backward(model);
    expect_equal(found_text(watch, 4), std::string());
  });
}

TEST_CASE("a NaN that backward makes is named with its rank, before it is averaged") {
  run_ranks(2, [](int rank) {
    auto model = sharded_model();
    NumericsWatch watch(*model);
    const auto fault = replace_output(model, "1", [&](at::Tensor& output) {
      if (rank == 1) {
        output.register_hook([](const at::Tensor& gradient) { return gradient * std::nan(""); });
      }
    });
    backward(model);
    expect_equal(found_text(watch, 5),
                 std::string("step 5, rank 1: the gradient of the output of '0' has NaN"));  // unit 1 made it
  });
}

TEST_CASE("a sum of squares that overflows is no infinity, and largest elements are read where they are needed") {
  nn::Sequential model(nn::Linear(3, 2));
  NumericsWatch watch(*model);
  backward(model);
  expect_equal(found_text(watch, 1), std::string());
  expect_equal(watch.numbers().front().max_abs.has_value(), false);
  const auto large = model->forward(at::full({4, 3}, 1e30));
  expect_equal(found_text(watch, 2), std::string());
  expect_equal(std::isinf(watch.numbers().front().norm), true);
  expect_equal(watch.numbers().front().max_abs.value(), large.abs().max().item<double>());
}

TEST_CASE("a graph outlives the watch, and parts of a step count together") {
  nn::Sequential model(nn::Linear(3, 2), nn::ReLU());
  at::Tensor loss;
  {
    NumericsWatch watch(*model, {.every_module = true});
    backward(model, 1e30);
    backward(model);
    watch.check(1);
    size_t outputs = 0;
    for (const auto& numbers : watch.numbers()) {
      outputs += numbers.kind == WatchedTensor::Output ? 1 : 0;
    }
    expect_equal(outputs, size_t{3});
    loss = model->forward(at::ones({4, 3})).sum();
  }
  loss.backward();
}

}  // namespace tessera::testing
