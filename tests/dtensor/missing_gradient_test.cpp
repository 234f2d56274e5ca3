// Gradients that are not there: a function may pass none on.

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Its input gets no gradient, as one that a checkpointed module was given and did not use.
struct WithoutGradient : torch::autograd::Function<WithoutGradient> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x.mul(2); }
  static variable_list backward(AutogradContext*, const variable_list&) { return {at::Tensor()}; }
};

/// Its input's gradient is plain zeros, as autograd makes where it knows that there is none.
struct WithPlainZeros : torch::autograd::Function<WithPlainZeros> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x.mul(2); }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    return {at::zeros(gradients[0].sizes())};
  }
};

/// Its input's gradient is a view with gaps.
struct WithGaps : torch::autograd::Function<WithGaps> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x.mul(2); }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    return {at::cat({gradients[0], gradients[0]}, 1).narrow(1, 0, gradients[0].size(1))};
  }
};

/// Runs `hook` on every rank within a backward, on a gradient of ones of five elements.
void in_backward(const std::function<void(const at::Tensor& gradient, int rank)>& hook) {
  run_ranks(2, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto x = distribute_tensor(at::ones({5}), mesh, {Shard(0)}).requires_grad_();
    bool called = false;
    x.register_hook([&](const at::Tensor& gradient) {
      called = true;
      hook(gradient, rank);
    });
    x.sum().backward();
    TESSERA_EXPECT(called);
  });
}

}  // namespace

TEST_CASE("a gradient that is not there stays so on its way between layouts, locals and meshes", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto root = init_device_mesh(at::kCPU, {1, 2}, {"a", "b"});
    const auto mesh = root["b"];
    const std::vector<std::function<at::Tensor(const at::Tensor&)>> ways = {
        [](const at::Tensor& x) { return redistribute(x, {Replicate()}); },
        [&](const at::Tensor& x) {
          return redistribute(x, root, {Replicate(), Shard(0)});
        },
        [&](const at::Tensor& x) {
          return from_local(to_local(x), mesh, {Shard(0)}, {.shape = std::vector{int64_t{5}}});
        },
        [](const at::Tensor& x) { return full_tensor(x); },
    };
    for (const auto& way : ways) {
      auto x = distribute_tensor(at::ones({5}), mesh, {Shard(0)}).requires_grad_();
      const auto unused = WithoutGradient::apply(way(x));
      unused.sum().backward();
      TESSERA_EXPECT(!x.grad().defined());
      const auto both = way(x).sum() + WithoutGradient::apply(way(x)).sum();
      both.backward();
      expect_bit_equal(full_tensor(x.grad()), at::ones({5}));
    }
  });
}

TEST_CASE("plain zeros add nothing to a gradient, and leave it dense", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto x = distribute_tensor(at::ones({3, 4}), mesh, {Shard(0)}).requires_grad_();
    for (const bool zeros_first : {false, true}) {  // the last one that ran forward is the first one backward
      const auto a = zeros_first ? WithGaps::apply(x) : WithPlainZeros::apply(x);
      const auto b = zeros_first ? WithPlainZeros::apply(x) : WithGaps::apply(x);
      const auto gradient = torch::autograd::grad({a.sum() + b.sum()}, {x})[0];
      expect_bit_equal(full_tensor(gradient), at::ones({3, 4}));
      TESSERA_EXPECT(gradient.is_contiguous() && to_local(gradient).is_contiguous());
    }
  });
}

TEST_CASE("zeros whose memory others have do not become a DTensor", "[dtensor]") {
  in_backward([](const at::Tensor& gradient, int) {
    const auto rows = at::zeros({2, 5}), whole = at::zeros({5});
    auto row = rows.select(0, 1), same = whole.detach();
    expect_throws<ValueError>([&] { row.add_(gradient); }, "DTensors and plain tensors are mixed");
    expect_throws<ValueError>([&] { same.add_(gradient); }, "DTensors and plain tensors are mixed");
    auto own = at::zeros({5});
    own.add_(gradient);
    expect_bit_equal(full_tensor(own), at::ones({5}));
  });
}

TEST_CASE("what is zeros on one rank alone is refused on every rank", "[dtensor]") {
  in_backward([](const at::Tensor& gradient, int rank) {
    const auto plain = at::full({5}, static_cast<float>(rank));
    expect_throws<ValueError>([&] { gradient.add(plain); }, "DTensors and plain tensors are mixed");
    expect_bit_equal(full_tensor(gradient.add(at::zeros({5}))), at::ones({5}));
  });
}

}  // namespace tessera
