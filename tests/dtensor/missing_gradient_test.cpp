// Gradients that are not there: a function may pass none on.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/custom_function.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

using namespace tessera;

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Its input gets no gradient, as one that a checkpointed module was given and did not use.
struct WithoutGradient : torch::autograd::Function<WithoutGradient> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x.mul(2); }
  static variable_list backward(AutogradContext*, const variable_list&) { return {at::Tensor()}; }
};

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
