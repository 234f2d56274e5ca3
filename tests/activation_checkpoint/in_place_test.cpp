// In-place writes in and around checkpointed regions: allowed where they are without, an error elsewhere.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>

#include "activation_checkpoint/checkpoint.h"
#include "base/error.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/activation_checkpoint/leaf.h"
#include "third_party/catch2/catch.h"

namespace tessera {

TEST_CASE("an input that is changed in place before backward is an error") {
  const auto x = leaf(1, {4});
  auto y = x * 2;
  const auto out = checkpoint([](const at::Tensor& z) { return z.tanh(); }, y);
  y.add_(1);
  CHECK_THROWS_WITH(out.sum().backward(), Catch::Contains("modified by an inplace operation"));
}

TEST_CASE("a tensor that backward needs and the region itself changes in place is an error, as without the region") {
  const auto weight = leaf(2, {4, 4});
  const auto region = [&](const at::Tensor& x) {
    auto gate = x.mm(weight).sigmoid();
    gate.mul_(2);
    return gate.mm(weight);
  };
  CHECK_THROWS_WITH(region(leaf(1, {3, 4})).sum().backward(), Catch::Contains("modified by an inplace operation"));
  for (const bool determinism_check : {true, false}) {
    const auto out = checkpoint({.determinism_check = determinism_check}, region, leaf(1, {3, 4}));
    expect_throws<StateError>([&] { out.sum().backward(); },
                              "checkpoint: a tensor that backward needs, Float [3, 4] on cpu, was changed in place "
                              "after autograd saved it: it is at version 1, but was saved at version 0");
  }
}

TEST_CASE("what a region may change in place, and what may be changed after its backward") {
  const auto weight = leaf(2, {4, 4}), x = leaf(1, {3, 4});
  const auto region = [&](const at::Tensor& y) {
    auto hidden = y.mm(weight);
    hidden.mul_(0.5).add_(y).tanh_();
    return hidden.mm(weight).tanh();
  };
  for (int step = 0; step < 3; ++step) {
    const auto expected = torch::autograd::grad({region(x).sum()}, {x, weight});
    const auto actual = torch::autograd::grad({checkpoint(region, x).sum()}, {x, weight});
    expect_bit_equal(actual[0], expected[0]);
    expect_bit_equal(actual[1], expected[1]);
    const at::NoGradGuard no_grad;
    weight.sub_(actual[1]);
    x.sub_(actual[0]);
  }
}

TEST_CASE("a parameter that is changed between forward and backward is an error") {
  const auto weight = leaf(2, {4, 4});
  const auto change = [&] {
    const at::NoGradGuard no_grad;
    weight.mul_(2);
  };
  const auto plain = leaf(1, {3, 4}).tanh().mm(weight);
  const auto region = [&](const at::Tensor& x) { return x.tanh().mm(weight); };
  const auto out = checkpoint(region, leaf(1, {3, 4}));
  const auto unchecked = checkpoint({.determinism_check = false}, region, leaf(1, {3, 4}));
  change();
  CHECK_THROWS_WITH(plain.sum().backward(), Catch::Contains("modified by an inplace operation"));
  expect_throws<StateError>([&] { out.sum().backward(); },
                            "checkpoint: tensor 1 that autograd saves, Float [4, 4] on cpu, was changed in place since "
                            "the first forward: it is at version 2, but was at version 1");
  unchecked.sum().backward();
}

TEST_CASE("a region that changes its own input in place cannot be computed again, and goes with its graph") {
  const auto witness = std::make_shared<int>();
  const auto weight = leaf(2, {4});
  const bool has_gradient = GENERATE(true, false), calls_backward = GENERATE(true, false);
  {
    const auto x = has_gradient ? leaf(1, {4}) * 2 : leaf(1, {4}).detach();
    const auto y = checkpoint([&weight, witness](at::Tensor z) { return z.mul_(weight).sigmoid_() * 3; }, x);
    if (calls_backward) {
      CHECK_THROWS_WITH(y.sum().backward(), Catch::Contains("modified by an inplace operation"));
    }
  }
  CHECK(witness.use_count() == 1);
}

}  // namespace tessera
