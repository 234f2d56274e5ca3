#include "parallel/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

struct LossAndGradients {
  at::Tensor loss, input, weight;  // input and weight with gradients

  void expect_close_to(const LossAndGradients& expected, Tolerance tolerance = kDoubleTolerance) const {
    expect_close(whole(loss.detach()), expected.loss.detach(), tolerance);
    expect_close(whole(input.grad()), expected.input.grad(), tolerance);
    expect_close(whole(weight.grad()), expected.weight.grad(), tolerance);
  }
};

struct LinearLossCase {
  std::vector<int64_t> rows;
  int64_t classes = 7;
  int64_t ignored = 0;  // first rows
  LinearCrossEntropyOptions options = {};

  std::string name() const { return fmt::format("rows {}, {} classes, {} ignored", rows, classes, ignored); }

  at::Tensor input() const {
    auto sizes = rows;
    sizes.push_back(5);
    return make_input(1, sizes).set_requires_grad(true);
  }
  at::Tensor weight() const { return make_input(2, {classes, 5}).set_requires_grad(true); }
  at::Tensor target() const {
    const auto target = at::randint(classes, rows, make_generator(3), at::kLong);
    target.view(-1).narrow(0, 0, ignored).fill_(options.ignore_index);
    return target;
  }

  /// By libtorch's ops.
  LossAndGradients expected() const {
    LossAndGradients result{.loss = {}, .input = input(), .weight = weight()};
    auto logits = at::linear(result.input, result.weight).flatten(0, -2);
    if (options.softcap) {
      logits = (logits / *options.softcap).tanh() * *options.softcap;
    }
    const auto labels = target().flatten();
    const auto sum = at::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum, options.ignore_index);
    const auto counted = labels.ne(options.ignore_index).sum().item<double>();
    result.loss = sum / options.count.value_or(counted);
    (3 * result.loss).backward();
    return result;
  }

  LossAndGradients actual(const at::Tensor& input, const at::Tensor& weight) const {
    const auto loss = linear_cross_entropy(input, weight, target(), options);
    (3 * loss).backward();
    return {.loss = loss, .input = input, .weight = weight};
  }
};

const std::vector<LinearLossCase> kCases = {
    {.rows = {6}},
    {.rows = {2, 3}, .options = {.rows_at_once = 4}},
    {.rows = {2, 7}, .classes = 2, .options = {.rows_at_once = 1}},
    {.rows = {11}, .classes = 1, .options = {.rows_at_once = 3}},
    {.rows = {11}, .ignored = 4, .options = {.rows_at_once = 3}},
    {.rows = {11}, .ignored = 4, .options = {.ignore_index = 2}},
    {.rows = {9}, .ignored = 9, .options = {.count = 4}},
    {.rows = {3, 5}, .classes = 13, .options = {.count = 2.5, .softcap = 0.7, .rows_at_once = 4}},
    {.rows = {0}, .options = {.count = 1}},
};

}  // namespace

TEST_CASE("linear_cross_entropy is a linear layer's cross-entropy, with its gradients", "[parallel]") {
  for (const auto& test : kCases) {
    INFO(test.name());
    const auto expected = test.expected();
    test.actual(test.input(), test.weight()).expect_close_to(expected);
    // Without gradients, and with that of one operand.
    const auto input = test.input(), weight = test.weight();
    test.actual(input, weight.detach());
    expect_close(input.grad(), expected.input.grad(), kDoubleTolerance);
    test.actual(input.detach(), weight);
    expect_close(weight.grad(), expected.weight.grad(), kDoubleTolerance);
    const c10::InferenceMode inference;
    expect_close(linear_cross_entropy(input, weight, test.target(), test.options), expected.loss.detach(),
                 kDoubleTolerance);
  }
}

TEST_CASE("linear_cross_entropy with a graph that is kept for another backward", "[parallel]") {
  const LinearLossCase test{.rows = {7}};
  const auto input = test.input(), weight = test.weight();
  const auto loss = 3 * linear_cross_entropy(input, weight, test.target(), test.options);
  const auto first = torch::autograd::grad({loss}, {input, weight}, {}, /*retain_graph=*/true);
  const auto last = torch::autograd::grad({loss}, {input, weight});
  const auto expected = test.expected();
  for (const auto& grads : {first, last}) {
    expect_close(grads[0], expected.input.grad(), kDoubleTolerance);
    expect_close(grads[1], expected.weight.grad(), kDoubleTolerance);
  }
}

TEST_CASE("linear_cross_entropy over ranks that have some classes each", "[parallel]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      for (const auto& test : kCases) {
        const auto expected = test.expected();
        for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
          const auto weight = [&] {
            return distribute_tensor(test.weight().detach(), mesh, {placement}).set_requires_grad(true);
          };
          test.actual(test.input(), weight()).expect_close_to(expected);
          for (const Placement& of_input : {Placement(Shard(0)), Placement(Replicate())}) {
            const auto input = distribute_tensor(test.input().detach(), mesh, {of_input}).set_requires_grad(true);
            const auto actual = test.actual(input, weight());
            actual.expect_close_to(expected);
            expect_equal(placements(actual.weight.grad()), Placements{placement});
          }
        }
      }
    });
  }
}

TEST_CASE("linear_cross_entropy in bfloat16 adds up in float32", "[parallel]") {
  const LinearLossCase test{.rows = {400}, .classes = 30, .options = {.rows_at_once = 32}};
  const auto input = test.input().detach().to(at::kBFloat16), weight = test.weight().detach().to(at::kBFloat16);
  // The same rounded operands in float64.
  const auto exact_input = input.to(at::kDouble).set_requires_grad(true);
  const auto exact_weight = weight.to(at::kDouble).set_requires_grad(true);
  const auto expected = test.actual(exact_input, exact_weight);
  const auto actual = test.actual(input.clone().set_requires_grad(true), weight.clone().set_requires_grad(true));
  REQUIRE(actual.loss.scalar_type() == at::kFloat);
  REQUIRE(actual.weight.grad().scalar_type() == at::kBFloat16);
  CHECK(std::abs(actual.loss.item<double>() / expected.loss.item<double>() - 1) < 1e-3);
  const auto error = [](const at::Tensor& own, const at::Tensor& exact) {
    return ((own.to(at::kDouble) - exact).norm() / exact.norm()).item<double>();
  };
  CHECK(error(actual.input.grad(), exact_input.grad()) < 5e-3);
  CHECK(error(actual.weight.grad(), exact_weight.grad()) < 5e-3);
}

TEST_CASE("linear_cross_entropy refuses operands that do not fit", "[parallel]") {
  const LinearLossCase test{.rows = {6}};
  const auto input = test.input(), weight = test.weight(), target = test.target();
  expect_throws<ValueError>([&] { linear_cross_entropy(input, weight.narrow(1, 0, 4), target); }, "input [6, 5]");
  expect_throws<ValueError>([&] { linear_cross_entropy(input.to(at::kFloat), weight, target); }, "same floating dtype");
  expect_throws<ValueError>([&] { linear_cross_entropy(input, weight, target.narrow(0, 0, 5)); }, "target [5]");
  expect_throws<ValueError>([&] { linear_cross_entropy(input, weight, target.to(at::kInt)); }, "in Int");
  expect_throws<ValueError>([&] { linear_cross_entropy(input, weight, at::full({6}, 7, at::kLong)); },
                            "a target is 7; allowed are 0 to 6, and -100");
  expect_throws<ValueError>([&] { linear_cross_entropy(input, weight, target, {.rows_at_once = -1}); }, "is -1");
  const auto loss = linear_cross_entropy(input, weight, target);
  expect_throws<NotImplementedError>(
      [&] { torch::autograd::grad({loss}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true); },
      "create_graph");
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    const auto by_feature = distribute_tensor(weight.detach(), mesh, {Shard(1)});
    expect_throws<ValueError>([&] { linear_cross_entropy(input, by_feature, target); }, "Shard(1)");
    const auto placed = distribute_tensor(input.detach(), mesh, {Replicate()});
    expect_throws<ValueError>([&] { linear_cross_entropy(placed, weight, target); }, "make weight a DTensor");
  });
}

}  // namespace tessera::testing
