// checkpoint() in one process: values and gradients are those without it, and nothing inside a region is kept.

#include "activation_checkpoint/checkpoint.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/activation_checkpoint/leaf.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

at::Tensor draw(uint64_t seed, at::IntArrayRef sizes) {
  return at::randn(sizes, make_generator(seed));
}

/// Three ops that save what they compute, then a product that saves its operands.
struct Region {
  at::Tensor weight;
  int* calls;
  WeakTensor* inner = nullptr;
  int* tails = nullptr;

  at::Tensor operator()(const at::Tensor& x) const {
    ++*calls;
    auto hidden = x.mm(weight).tanh().sigmoid();
    if (inner) {
      *inner = WeakTensor(hidden.getIntrusivePtr());
    }
    auto out = hidden.mm(weight);
    if (tails) {
      ++*tails;
    }
    return out;
  }
};

struct Gradients {
  at::Tensor x, weight, out;
};

/// Of the region, called as `call(region, x)`, with fixed values.
template <class Call>
Gradients gradients_of(Region region, const Call& call) {
  auto x = leaf(1, {3, 4});
  region.weight = leaf(2, {4, 4});
  const auto out = call(region, x);
  (out * out).sum().backward();
  return {x.grad(), region.weight.grad(), out.detach()};
}

void expect_same(const Gradients& actual, const Gradients& expected) {
  expect_bit_equal(actual.out, expected.out);
  expect_bit_equal(actual.x, expected.x);
  expect_bit_equal(actual.weight, expected.weight);
}

}  // namespace

TEST_CASE("a checkpointed region has the values and gradients of the plain call, bit for bit") {
  int calls = 0;
  const Region region{.weight = {}, .calls = &calls};
  const auto plain = gradients_of(region, [](const Region& f, const at::Tensor& x) { return f(x); });
  CHECK(calls == 1);
  for (const bool early_stop : {true, false}) {
    calls = 0;
    const auto kept = gradients_of(
        region, [&](const Region& f, const at::Tensor& x) { return checkpoint({.early_stop = early_stop}, f, x); });
    CHECK(calls == 2);
    expect_same(kept, plain);
  }
}

TEST_CASE("activations inside a region are gone after forward, and come back for its backward only") {
  int calls = 0;
  WeakTensor inner{c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>()};
  const Region region{.weight = leaf(2, {4, 4}), .calls = &calls, .inner = &inner};
  const auto x = leaf(1, {3, 4});
  auto plain = region(x);
  CHECK(!inner.expired());
  auto out = checkpoint(region, x);
  CHECK(inner.expired());
  out.sum().backward();
  CHECK(inner.expired());
}

TEST_CASE("the second forward ends when it has what backward needs, unless early_stop is off") {
  int calls = 0, tails = 0;
  const Region region{.weight = leaf(2, {4, 4}), .calls = &calls, .tails = &tails};
  checkpoint(region, leaf(1, {3, 4})).sum().backward();
  CHECK(calls == 2);
  CHECK(tails == 1);
  tails = 0;
  checkpoint({.early_stop = false}, region, leaf(1, {3, 4})).sum().backward();
  CHECK(tails == 2);
}

TEST_CASE("a region may have several inputs and outputs, of any type that hooks can see into") {
  const auto function = [](const std::vector<at::Tensor>& xs, std::optional<at::Tensor> maybe, double scale) {
    auto sum = xs[0].tanh() * xs[1].sigmoid();
    return std::tuple(sum * scale, maybe ? *maybe * sum : sum, at::Tensor());
  };
  const auto run = [&](bool checkpointed) {
    const auto a = leaf(1, {5}), b = leaf(2, {5}), c = leaf(3, {5});
    const std::vector<at::Tensor> xs{a, b};
    const auto [first, second, none] =
        checkpointed ? checkpoint(function, xs, std::optional(c), 0.5) : function(xs, std::optional(c), 0.5);
    CHECK(!none.defined());
    (first.sum() + second.square().sum()).backward();
    return std::vector{a.grad(), b.grad(), c.grad()};
  };
  const auto plain = run(false), kept = run(true);
  for (size_t i = 0; i < plain.size(); ++i) {
    expect_bit_equal(kept[i], plain[i]);
  }
}

TEST_CASE("regions nest: an inner one keeps nothing that the outer one drops") {
  int inner_calls = 0, outer_calls = 0;
  WeakTensor between{c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>()};
  const auto x = leaf(1, {4}), weight = leaf(2, {4});
  const auto inner = [&](const at::Tensor& y) {
    ++inner_calls;
    return (y * weight).tanh() * y;
  };
  const auto outer = [&](const at::Tensor& y) {
    ++outer_calls;
    const auto middle = y.sigmoid() * weight;
    between = WeakTensor(middle.getIntrusivePtr());
    return checkpoint(inner, middle).exp();
  };
  const auto out = checkpoint(outer, x);
  CHECK(between.expired());
  out.sum().backward();
  CHECK(outer_calls == 2);
  CHECK(inner_calls == 3);
  const auto x2 = leaf(1, {4}), weight2 = leaf(2, {4});
  const auto middle = x2.sigmoid() * weight2;
  ((middle * weight2).tanh() * middle).exp().sum().backward();
  expect_bit_equal(x.grad(), x2.grad());
  expect_bit_equal(weight.grad(), weight2.grad());
}

TEST_CASE("a graph that is kept runs backward again, and keeps nothing in between") {
  int calls = 0;
  WeakTensor inner{c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>()};
  const Region region{.weight = leaf(2, {4, 4}), .calls = &calls, .inner = &inner};
  const auto x = leaf(1, {3, 4});
  const auto out = checkpoint(region, x).sum();
  out.backward({}, /*retain_graph=*/true);
  const auto once = x.grad().clone();
  CHECK(inner.expired());
  out.backward();
  CHECK(calls == 3);
  expect_bit_equal(x.grad(), once + once);
}

TEST_CASE("double backward goes through a region") {
  const auto second_gradient = [](bool checkpointed) {
    const auto x = leaf(1, {4});
    const auto function = [](const at::Tensor& y) { return (y * y).tanh() * y; };
    const auto out = checkpointed ? checkpoint(function, x) : function(x);
    const auto first = torch::autograd::grad({out.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.square().sum()}, {x})[0];
  };
  expect_close(second_gradient(true), second_gradient(false), {.rtol = 1e-6, .atol = 1e-7});
}

TEST_CASE("a forward may take a gradient inside of a region") {
  const bool early_stop = GENERATE(true, false);
  const auto run = [early_stop](bool checkpointed) {
    const auto x = leaf(1, {4});
    const auto penalty = [](const at::Tensor& y) {
      const auto value = (y * y).tanh();
      const auto slope = torch::autograd::grad({value.sum()}, {y}, {}, true, /*create_graph=*/true)[0];
      return value + slope.square();
    };
    (checkpointed ? checkpoint({.early_stop = early_stop}, penalty, x) : penalty(x)).sum().backward();
    return x.grad();
  };
  expect_close(run(true), run(false), {.rtol = 1e-6, .atol = 1e-7});
}

TEST_CASE("dropout in a region drops the same elements again, and leaves later draws alone") {
  at::manual_seed(7);
  const auto x = leaf(1, {100});
  const auto out = checkpoint([](const at::Tensor& y) { return at::dropout(y.tanh() * y, 0.5, true).sin(); }, x);
  const auto expected_next = [] {
    at::manual_seed(7);
    at::dropout(at::rand({100}, make_generator(1)), 0.5, true);
    return at::rand({3});
  }();
  at::manual_seed(7);
  const auto x2 = leaf(1, {100});
  const auto plain = at::dropout(x2.tanh() * x2, 0.5, true).sin();
  plain.sum().backward();
  out.sum().backward();
  expect_bit_equal(out.detach(), plain.detach());
  expect_bit_equal(x.grad(), x2.grad());
  expect_bit_equal(at::rand({3}), expected_next);
}

TEST_CASE("autocast of the first forward holds in the second, and its cached casts do not outlive it") {
  const auto weight = leaf(2, {4, 4}), x = leaf(1, {3, 4});
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::increment_nesting();
  const auto out = checkpoint([&](const at::Tensor& y) { return y.mm(weight).mm(weight); }, x);
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  at::autocast::set_autocast_enabled(at::kCPU, false);
  CHECK(out.scalar_type() == at::kBFloat16);
  out.sum().backward();
  CHECK(!at::autocast::is_autocast_enabled(at::kCPU));
  const at::NoGradGuard no_grad;
  weight.zero_();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto after = x.mm(weight);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  CHECK(after.abs().max().item<float>() == 0);
}

TEST_CASE("without grad mode, or without anything that needs a gradient, a region runs once") {
  int calls = 0;
  const Region region{.weight = leaf(2, {4, 4}), .calls = &calls};
  {
    const at::NoGradGuard no_grad;
    CHECK(!checkpoint(region, leaf(1, {3, 4})).requires_grad());
  }
  const Region constant{.weight = draw(2, {4, 4}), .calls = &calls};
  CHECK(!checkpoint(constant, draw(1, {3, 4})).requires_grad());
  CHECK(calls == 2);
}

TEST_CASE("shapes go through a region on the meta device") {
  int calls = 0;
  const Region region{.weight = draw(2, {4, 4}).to(at::kMeta).requires_grad_(), .calls = &calls};
  const auto x = draw(1, {3, 4}).to(at::kMeta).requires_grad_();
  checkpoint(region, x).sum().backward();
  CHECK(x.grad().sizes() == x.sizes());
  CHECK(calls == 2);
}

TEST_CASE("a forward that differs the second time is an error that says how") {
  int calls = 0;
  const auto x = leaf(1, {4});
  const auto wider = checkpoint(
      [&](const at::Tensor& y) {
        return (++calls == 1 ? y : y.expand({2, 4})).tanh().sum();
      },
      x);
  expect_throws<StateError>(
      [&] { wider.backward(); },
      "checkpoint: the forward that backward computes again differs from the first: tensor 0 that autograd saves is "
      "Float [2, 4] on cpu, but was Float [4] on cpu");
  calls = 0;
  const auto fewer = checkpoint([&](const at::Tensor& y) { return ++calls == 1 ? y.tanh().tanh() : y.tanh(); }, x);
  expect_throws<StateError>([&] { fewer.sum().backward(); }, "autograd saves 1 tensors, but saved 2");
}

TEST_CASE("an exception of the second forward reaches who called backward, and the region can be run again") {
  int calls = 0;
  const auto x = leaf(1, {4});
  const auto out = checkpoint(
      [&](const at::Tensor& y) {
        auto hidden = y.tanh();
        TESSERA_CHECK(ValueError, ++calls != 2, "no luck");
        return hidden * y;
      },
      x);
  CHECK_THROWS_WITH(out.sum().backward({}, /*retain_graph=*/true), Catch::Contains("no luck"));
  out.sum().backward();
  const auto x2 = leaf(1, {4});
  (x2.tanh() * x2).sum().backward();
  expect_bit_equal(x.grad(), x2.grad());
}

TEST_CASE("a generator among the arguments gives the same numbers again, and goes on after forward") {
  const auto draw = [](const at::Tensor& x, std::optional<at::Generator> generator) {
    return x * at::rand({4}, std::move(generator));
  };
  const auto run = [&](bool checkpointed) {
    const auto x = leaf(1, {4});
    const auto generator = make_generator(5);
    const auto out = checkpointed ? checkpoint(draw, x, std::optional(generator)) : draw(x, generator);
    const auto later = at::rand({4}, generator);
    out.sum().backward();
    return std::vector{out.detach(), x.grad(), later, at::rand({4}, generator)};
  };
  const auto actual = run(true), expected = run(false);
  for (size_t i = 0; i < expected.size(); ++i) {
    expect_bit_equal(actual[i], expected[i]);
  }
}

TEST_CASE("where ranks are threads, a region leaves the generator alone that all draw from") {
  const auto second_draw = [](bool checkpoints) {
    at::manual_seed(4);
    at::Tensor drawn;
    run_ranks(2, [&](int rank) {
      const auto x = leaf(static_cast<uint64_t>(rank), {4});
      const auto out = checkpoints ? checkpoint([](const at::Tensor& y) { return y.sin().tanh(); }, x) : x.sin();
      if (rank == 0) {
        at::rand({4});
      }
      barrier(default_group());
      out.sum().backward();
      barrier(default_group());
      if (rank == 0) {
        drawn = at::rand({4});
      }
    });
    return drawn;
  };
  expect_bit_equal(second_draw(true), second_draw(false));
}

TEST_CASE("where ranks are threads, a draw from the shared generator is an error, and the rank's own is not") {
  run_ranks(2, [](int rank) {
    const auto x = leaf(static_cast<uint64_t>(rank), {4});
    expect_throws<NotImplementedError>(
        [&] { checkpoint([](const at::Tensor& y) { return at::dropout(y, 0.5, true); }, x); },
        "on a plain tensor draws from libtorch's default generator, which ranks that are threads share");
    checkpoint(
        {.preserve_rng_state = false}, [](const at::Tensor& y) { return at::dropout(y, 0.5, true); }, x);
    checkpoint([](const at::Tensor& y) { return y * at::rand({4}, make_generator(3)); }, x).sum().backward();
    for (const bool train : {true, false}) {  // which draws nothing
      checkpoint([=](const at::Tensor& y) { return at::dropout(y, train ? 0 : 0.5, train).sin(); }, x).sum().backward();
    }
    const auto attend = [](double dropout) {
      return [dropout](const at::Tensor& y) { return at::scaled_dot_product_attention(y, y, y, {}, dropout); };
    };
    const auto words = leaf(static_cast<uint64_t>(rank), {1, 2, 3, 4});
    checkpoint(attend(0), words).sum().backward();
    expect_throws<NotImplementedError>([&] { checkpoint(attend(0.5), words); },
                                       "draws from libtorch's default generator");
  });
}

}  // namespace tessera
