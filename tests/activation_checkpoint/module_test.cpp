// checkpoint_module and apply_activation_checkpointing: which modules, how often their forward and hooks run.

#include <ATen/TensorOperators.h>

#include "activation_checkpoint/checkpoint.h"
#include "base/error.h"
#include "nn/hooked.h"
#include "nn/linear.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/small_models.h"
#include "third_party/catch2/catch.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

struct CountedImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, double scale = 2) {
    ++calls;
    return (x.tanh() * scale).sin();
  }
  int calls = 0;
};
TESSERA_MODULE(Counted);

struct ByPointerImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, std::vector<at::Tensor>* cache) {
    cache->push_back(x);
    return x.tanh();
  }
};
TESSERA_MODULE(ByPointer);

struct NestImpl : torch::nn::Module {
  NestImpl() {
    block = register_module("block", Block(4, 3));
    twin = register_module("twin", block);
    counted = register_module("counted", Counted());
  }
  at::Tensor forward(at::Tensor x) { return counted(block(x)); }

  Block block{nullptr}, twin{nullptr};
  Counted counted;
};
TESSERA_MODULE(Nest);

at::Tensor leaf(uint64_t seed, at::IntArrayRef sizes) {
  return make_batch(seed, sizes[0], sizes[1]).requires_grad_();
}

bool is_block(const std::string&, torch::nn::Module& module) {
  return dynamic_cast<BlockImpl*>(&module) != nullptr;
}

}  // namespace

TEST_CASE("a checkpointed module computes again inside of its hooks, which run once") {
  Counted module;
  int before = 0, after = 0;
  hook_point(*module, "test").register_forward_pre_hook([&](HookPoint&, TensorRefs inputs) {
    ++before;
    *inputs[0] = *inputs[0] * 3;
  });
  hook_point(*module, "test").register_forward_hook([&](HookPoint&, TensorRefs) { ++after; });
  checkpoint_module(*module);
  const auto x = leaf(1, {2, 3}), x2 = leaf(1, {2, 3});
  module(x, 0.5).sum().backward();
  CHECK(module->calls == 2);
  CHECK(before == 1);
  CHECK(after == 1);
  ((x2 * 3).tanh() * 0.5).sin().sum().backward();
  expect_bit_equal(x.grad(), x2.grad());
  module(x).sum().backward();  // with forward's default argument
  CHECK(module->calls == 4);
}

TEST_CASE("the module of a region lives until its backward") {
  const auto x = leaf(1, {2, 4});
  at::Tensor out;
  {
    Nest nest;
    checkpoint_module(*nest->block);
    out = nest(x);
  }
  out.sum().backward();
  CHECK(x.grad().defined());
}

TEST_CASE("apply_activation_checkpointing wraps what the policy chooses, each module once") {
  Nest plain, nest;
  fill_parameters(*plain, 1);
  fill_parameters(*nest, 1);
  CHECK(apply_activation_checkpointing(*nest, is_block) == 1);
  CHECK(apply_activation_checkpointing(
            *nest, [](const std::string& name, torch::nn::Module&) { return name == "counted" || name.empty(); }) == 2);
  const auto x = leaf(1, {2, 4}), x2 = leaf(1, {2, 4});
  const auto out = nest(x), expected = plain(x2);
  out.sum().backward();
  expected.sum().backward();
  expect_bit_equal(out.detach(), expected.detach());
  expect_bit_equal(x.grad(), x2.grad());
  const auto params = nest->parameters(), expected_params = plain->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    expect_bit_equal(params[i].grad(), expected_params[i].grad());
  }
}

TEST_CASE("wrong uses of checkpointed modules are errors that name the module and the remedy") {
  Nest nest;
  const auto none = [](const std::string&, torch::nn::Module&) { return false; };
  expect_throws<ValueError>([&] { apply_activation_checkpointing(*nest, none); }, "the policy chooses no module of");
  const auto all = [](const std::string&, torch::nn::Module&) { return true; };
  torch::nn::Linear stock(2, 2);
  expect_throws<StateError>([&] { apply_activation_checkpointing(*stock, all); },
                            "apply_activation_checkpointing: modules of type torch::nn::LinearImpl have no hook point");
  checkpoint_module(*nest->block);
  expect_throws<StateError>([&] { checkpoint_module(*nest->block); },
                            "checkpoint_module: tessera::testing::BlockImpl is checkpointed already");
  expect_throws<StateError>([&] { apply_activation_checkpointing(*nest, is_block); }, "is checkpointed already");
  ByPointer by_pointer;
  checkpoint_module(*by_pointer);
  std::vector<at::Tensor> cache;
  expect_throws<NotImplementedError>(
      [&] {
        by_pointer(leaf(1, {2, 2}), &cache);
      },
      "it takes an argument by pointer or view (ArrayRef, string_view)");
}
