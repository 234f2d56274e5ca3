// checkpoint_module and apply_activation_checkpointing: which modules, how often their forward and hooks run.

#include <ATen/TensorOperators.h>

#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "activation_checkpoint/checkpoint.h"
#include "base/error.h"
#include "nn/hooks/hooked.h"
#include "nn/linear.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/activation_checkpoint/leaf.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera {

template <>
struct TensorVisitor<std::filesystem::path> : NoTensors {};

namespace testing {

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

struct ByPointersImpl : torch::nn::Module {
  at::Tensor forward(std::vector<at::Tensor*> inputs) { return inputs[0]->tanh() * inputs[1]->sin(); }
};
TESSERA_MODULE(ByPointers);

/// Copies of it are of one tensor.
struct Holder {
  std::shared_ptr<at::Tensor> content;
};
auto tensor_fields(Holder& holder) {
  return std::tie(*holder.content);
}

struct ByHolderImpl : torch::nn::Module {
  at::Tensor forward(const Holder& holder) { return holder.content->tanh().sin(); }
};
TESSERA_MODULE(ByHolder);

struct Batch {
  at::Tensor tokens;
  std::map<std::string, at::Tensor> more;
};
auto tensor_fields(Batch& batch) {
  return std::tie(batch.tokens, batch.more);
}
struct BatchOfOthers {
  at::Tensor* tokens;
};
auto tensor_fields(BatchOfOthers& batch) {
  return std::tie(batch.tokens);
}

struct Node {
  at::Tensor value;
  std::vector<Node> children;
};
auto tensor_fields(Node& node) {
  return std::tie(node.value, node.children);
}
struct NodeOfOthers {
  std::map<std::string, NodeOfOthers> children;
  at::Tensor* value;
};
auto tensor_fields(NodeOfOthers& node) {
  return std::tie(node.children, node.value);
}

struct TreeImpl : torch::nn::Module {
  at::Tensor forward(const Node& node) { return (node.value * node.children.at(0).value).tanh(); }
};
TESSERA_MODULE(Tree);

template <class... T>
inline constexpr bool all_repeatable = (is_repeatable_argument<T> && ...);
template <class... T>
inline constexpr bool none_repeatable = (!is_repeatable_argument<T> && ...);

static_assert(all_repeatable<at::Tensor, const std::vector<at::Tensor>&, std::optional<at::Tensor>, std::string, Batch,
                             std::tuple<at::Tensor, int>, std::array<Batch, 2>, std::variant<at::Tensor, double>, Node,
                             std::optional<Node>, std::filesystem::path>);
static_assert(none_repeatable<at::Tensor*, std::vector<at::Tensor*>, const std::vector<at::Tensor*>&,
                              std::array<const int*, 2>, std::optional<at::Tensor*>, std::pair<at::Tensor, at::Tensor*>,
                              std::variant<int, at::Tensor*>, std::map<int, std::vector<at::Tensor*>>,
                              std::vector<std::string_view>, BatchOfOthers, NodeOfOthers>);

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

TEST_CASE("a checkpointed module computes again from a tree") {
  Tree module;
  const auto of = [&](const at::Tensor& x, const at::Tensor& y) { return module(Node{x, {{y, {}}}}); };
  const auto x = leaf(1, {2, 2}), y = leaf(2, {2, 2}), x2 = leaf(1, {2, 2}), y2 = leaf(2, {2, 2});
  of(x2, y2).sum().backward();
  checkpoint_module(*module);
  of(x, y).sum().backward();
  expect_bit_equal(x.grad(), x2.grad());
  expect_bit_equal(y.grad(), y2.grad());
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
  expect_throws<ValueError>([&] { apply_activation_checkpointing(*nest, none); },
                            "the policy chooses no module of tessera::testing::(anonymous namespace)::NestImpl;");
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

TEST_CASE("a checkpointed module whose arguments reach tensors of the caller is refused, and they stay") {
  auto x = leaf(1, {2, 2}), y = leaf(2, {2, 2});
  const auto kept = std::vector{x, y};
  ByPointers by_pointers;
  checkpoint_module(*by_pointers);
  expect_throws<NotImplementedError>([&] { by_pointers(std::vector{&x, &y}); }, "by pointer or view");
  const Holder holder{std::make_shared<at::Tensor>(x)};
  ByHolder by_holder;
  checkpoint_module(*by_holder);
  expect_throws<NotImplementedError>([&] { by_holder(holder); }, "an argument points to tensors of the caller");
  expect_throws<NotImplementedError>([&] { checkpoint([](const Holder& own) { return own.content->tanh(); }, holder); },
                                     "checkpoint: an argument points to tensors of the caller");
  CHECK(x.is_same(kept[0]));
  CHECK(y.is_same(kept[1]));
  CHECK(holder.content->is_same(x));
}

}  // namespace testing
}  // namespace tessera
