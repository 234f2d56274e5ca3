#include "nn/hooks/hooked.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <sstream>

#include "nn/linear.h"

// A range whose elements are ranges of the same type, without tensors.
template <>
struct tessera::TensorVisitor<std::filesystem::path> : tessera::NoTensors {};

namespace hooked_test {

using tessera::Hooked;
using tessera::HookPoint;
using tessera::TensorRefs;

struct State {
  at::Tensor hidden;
  int64_t steps = 0;
};
auto tensor_fields(State& state) {
  return std::tie(state.hidden);
}

struct BaseImpl : torch::nn::Module {
  std::pair<at::Tensor, State> forward(const State& state, std::vector<at::Tensor> xs, double scale = 2.0) {
    return {xs.at(0) * scale, State{state.hidden + 1, state.steps + 1}};
  }
};
struct InheritedImpl : BaseImpl {};
TESSERA_MODULE(Inherited);

struct ConstImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const std::string& mode = "add") const { return mode == "add" ? x + 1 : x; }
};
TESSERA_MODULE(Const);

struct OverloadedImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
  at::Tensor forward(at::Tensor x, at::Tensor y) { return x + y; }
};
TESSERA_MODULE_SIGNATURE(Overloaded, at::Tensor(at::Tensor, at::Tensor));

struct InPlaceImpl : torch::nn::Module {
  void forward(at::Tensor& out, at::Tensor&& moved, at::Tensor* pointer) { out = moved + *pointer; }
};
TESSERA_MODULE(InPlace);

struct Node {
  at::Tensor value;
  std::vector<Node> children;
};
auto tensor_fields(Node& node) {
  return std::tie(node.value, node.children);
}

struct TreeImpl : torch::nn::Module {
  at::Tensor forward(const Node& node, const std::filesystem::path& path = "a/b") {
    at::Tensor sum = node.value + std::distance(path.begin(), path.end());
    for (const auto& child : node.children) sum = sum + child.value;
    return sum;
  }
};
TESSERA_MODULE(Tree);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim, bool bias = true) {
    fc = register_module("fc", tessera::nn::Linear(tessera::nn::LinearOptions(dim, dim).bias(bias)));
  }
  at::Tensor forward(at::Tensor x) { return x + fc(x); }
  static int answer() { return 42; }
  tessera::nn::Linear fc{nullptr};
};
TESSERA_MODULE(Block);

template <class H, class F>
inline constexpr bool has_signature = std::is_same_v<decltype(&H::Impl::forward), F>;

static_assert(has_signature<tessera::nn::Linear, at::Tensor (tessera::nn::Linear::Impl::*)(const at::Tensor&)>);
static_assert(has_signature<Const, at::Tensor (Const::Impl::*)(const at::Tensor&, const std::string&) const>);
static_assert(has_signature<Overloaded, at::Tensor (Overloaded::Impl::*)(at::Tensor, at::Tensor)>);
static_assert(has_signature<Inherited, std::pair<at::Tensor, State> (Inherited::Impl::*)(
                                           const State&, std::vector<at::Tensor>, double)>);
static_assert(has_signature<InPlace, void (InPlace::Impl::*)(at::Tensor&, at::Tensor&&, at::Tensor*)>);
static_assert(!std::is_default_constructible_v<Block::Impl> && std::is_constructible_v<Block::Impl, int, bool>);
static_assert(std::is_convertible_v<std::shared_ptr<Block::Impl>, Block>);
static_assert(tessera::detail::HasOneForward<BlockImpl> && !tessera::detail::HasOneForward<OverloadedImpl> &&
              !tessera::detail::HasOneForward<torch::nn::SequentialImpl>);

at::Tensor number(double value) {
  return at::full({}, value);
}

TEST_CASE("a holder does what a torch ModuleHolder does", "[nn]") {
  Block empty = nullptr;
  CHECK(empty.is_empty());
  CHECK_FALSE(empty);
  Block block(3, /*bias=*/false);
  CHECK(block->fc->weight.sizes() == at::IntArrayRef({3, 3}));
  CHECK((*block).parameters().size() == 1);
  CHECK(block.get() == block.ptr().get());
  CHECK(Block::Impl::answer() == 42);
  empty = block.ptr();
  CHECK(empty.get() == block.get());
  Block second(std::make_shared<Block::Impl>(2));
  torch::nn::ModuleList list;
  list->push_back(block);
  list->push_back(second);
  CHECK(list->parameters().size() == 3);
  CHECK(list->ptr(0)->as<Block>() == block.get());
  CHECK(block->as<BlockImpl>() == block.get());
  struct Parent : torch::nn::Module {
    Block a{nullptr};
  } parent;
  parent.a = parent.register_module("a", block);
  CHECK(parent.named_parameters().keys() == std::vector<std::string>{"a.fc.weight"});
}

TEST_CASE("AnyModule and torch's Sequential take hooked modules and run their hooks", "[nn]") {
  Block block(3);
  tessera::nn::Linear linear(3, 2);
  int calls = 0;
  for (HookPoint* point : {static_cast<HookPoint*>(block.get()), static_cast<HookPoint*>(linear.get())}) {
    point->register_forward_hook([&](HookPoint&, TensorRefs) { ++calls; });
  }
  const at::Tensor x = at::ones({2, 3});
  const at::Tensor expected = linear(block(x));
  calls = 0;
  torch::nn::Sequential chain(block, linear);
  CHECK(at::equal(chain->forward(x), expected));
  chain->push_back("again", tessera::nn::Linear(2, 1));
  CHECK(chain->forward(x).sizes() == at::IntArrayRef({2, 1}));
  CHECK(calls == 4);
  torch::nn::AnyModule any(block);
  CHECK(&any.get<Block::Impl>() == block.get());
  CHECK(any.get<Block>().get() == block.get());
  any.forward(x);
  CHECK(calls == 5);
}

TEST_CASE("forward takes types that hold others of their own, of whose tensors hooks see all", "[nn]") {
  Tree module;
  const Node tree{number(1), {{number(2), {{number(9), {}}}}, {number(3), {}}}};
  CHECK(module(tree).item<double>() == 8);
  size_t seen = 0;
  module->register_forward_pre_hook([&](HookPoint&, TensorRefs inputs) { seen = inputs.size(); });
  CHECK(module(tree, "a/b/c").item<double>() == 9);
  CHECK(seen == 4);
}

TEST_CASE("hooks see struct, vector and pair arguments; default arguments work", "[nn]") {
  Inherited module;
  const State state{number(5), 1};
  const std::vector<at::Tensor> xs{number(3), at::Tensor()};
  CHECK(module(state, xs).first.item<double>() == 6);
  CHECK(module->call(state, xs, 4.0).first.item<double>() == 12);

  std::vector<size_t> counts;
  module->register_forward_pre_hook([&](HookPoint&, TensorRefs inputs) {
    counts.push_back(inputs.size());
    for (at::Tensor* input : inputs) *input = *input * 10;
  });
  module->register_forward_hook([&](HookPoint&, TensorRefs outputs) {
    counts.push_back(outputs.size());
    for (at::Tensor* output : outputs) *output = *output + 0.5;
  });
  const auto [y, next] = module(state, xs);
  CHECK(y.item<double>() == 60.5);
  CHECK(next.hidden.item<double>() == 51.5);
  CHECK(next.steps == 2);
  CHECK(counts == std::vector<size_t>{2, 2});
  CHECK(state.hidden.item<double>() == 5);
  CHECK(xs[0].item<double>() == 3);
}

TEST_CASE("const, overloaded and void forwards run under hooks", "[nn]") {
  const auto times_ten = [](HookPoint&, TensorRefs inputs) {
    for (at::Tensor* input : inputs) *input = *input * 10;
  };
  Const constant;
  constant->register_forward_pre_hook(times_ten);
  const Const::Impl& through_const = *constant;
  const at::Tensor one = number(1);
  CHECK(through_const.forward(one, "add").item<double>() == 11);
  CHECK(constant(one).item<double>() == 11);
  CHECK(one.item<double>() == 1);

  Overloaded overloaded;
  overloaded->register_forward_pre_hook(times_ten);
  CHECK(overloaded(number(1), number(2)).item<double>() == 30);

  InPlace in_place;
  in_place->register_forward_pre_hook(times_ten);
  at::Tensor out, pointee = number(2);
  in_place(out, number(1), &pointee);
  CHECK(out.item<double>() == 30);
  CHECK(pointee.item<double>() == 20);
}

TEST_CASE("hooked() shares a stock module's tensors, so its optimizer stays valid", "[nn]") {
  torch::nn::Linear stock(2, 1);
  torch::optim::SGD optimizer(stock->parameters(), torch::optim::SGDOptions(0.5));
  tessera::nn::Linear linear = tessera::hooked(stock);
  CHECK(linear->weight.is_same(stock->weight));
  CHECK(linear->parameters()[1].is_same(stock->bias));
  int calls = 0;
  linear->register_forward_hook([&](HookPoint&, TensorRefs) { ++calls; });
  const at::Tensor before = stock->weight.detach().clone();
  linear(at::ones({1, 2})).sum().backward();
  optimizer.step();
  CHECK(calls == 1);
  CHECK(at::equal(linear->weight.detach(), before - 0.5));
  CHECK(at::equal(linear(at::ones({1, 2})), stock(at::ones({1, 2}))));

  const std::shared_ptr<BaseImpl> derived = std::make_shared<InheritedImpl>();
  CHECK_THROWS_AS(tessera::hooked(derived), tessera::StateError);
  CHECK_THROWS_AS(tessera::hooked(torch::nn::Linear(nullptr)), tessera::ValueError);
  const std::shared_ptr<torch::nn::LinearImpl> as_stock = linear.ptr();
  CHECK_THROWS_WITH(tessera::hooked(as_stock), Catch::Contains("has a hook point already"));
}

TEST_CASE("names, printing and archives are those of the stock type", "[nn]") {
  std::ostringstream text;
  text << tessera::nn::Linear(2, 3) << "; " << Block(2);
  CHECK(text.str() ==
        "torch::nn::Linear(in_features=2, out_features=3, bias=true); hooked_test::BlockImpl(\n"
        "  (fc): torch::nn::Linear(in_features=2, out_features=2, bias=true)\n)");
  CHECK(Block(2)->name() == "hooked_test::BlockImpl");

  torch::manual_seed(1);
  torch::nn::Linear source(2, 3);
  tessera::nn::Linear target(2, 3);
  std::stringstream archive;
  torch::save(source, archive);
  torch::load(target, archive);
  CHECK(at::equal(target->weight, source->weight));
}

}  // namespace hooked_test
