#include "nn/hooks/clone.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/utils.h>

#include <catch2/catch.hpp>

#include "nn/embedding.h"
#include "nn/linear.h"
#include "nn/recurrent.h"
#include "nn/sequential.h"

namespace clone_test {

using tessera::nn::LinearOptions;

struct LanguageModelImpl : torch::nn::Cloneable<LanguageModelImpl> {
  explicit LanguageModelImpl(bool tied = false) : tied(tied) { LanguageModelImpl::reset(); }
  void reset() override {
    wte = register_module("wte", tessera::nn::Embedding(5, 3));
    head = register_module("head", tessera::nn::Linear(LinearOptions(3, 5).bias(false)));
    if (tied) tessera::tie_parameter(*head, "weight", wte->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) { return head(wte(tokens)); }

  bool tied;
  tessera::nn::Embedding wte{nullptr};
  tessera::nn::Linear head{nullptr};
};
TESSERA_MODULE(LanguageModel);

struct PlainImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
};
TESSERA_MODULE(Plain);

struct NarrowImpl : torch::nn::LinearImpl {
  using LinearImpl::LinearImpl;
};
TESSERA_MODULE(Narrow);

template <class Holder>
Holder cloned(const Holder& holder) {
  return std::dynamic_pointer_cast<typename Holder::Impl>(holder->clone());
}

TEST_CASE("a clone is hooked, equal, separate and draws no random numbers", "[nn]") {
  torch::manual_seed(3);
  tessera::nn::Linear linear(4, 2);
  linear->eval();
  torch::manual_seed(4);
  const at::Tensor expected = at::randn({3});
  torch::manual_seed(4);
  tessera::nn::Linear copy = cloned(linear);
  CHECK(at::equal(at::randn({3}), expected));
  REQUIRE(copy);
  CHECK(at::equal(copy->weight, linear->weight));
  CHECK_FALSE(copy->weight.is_same(linear->weight));
  CHECK_FALSE(copy->weight.is_alias_of(linear->weight));
  CHECK(copy->weight.is_same(copy->parameters()[0]));
  CHECK(copy->weight.requires_grad());
  CHECK_FALSE(copy->is_training());
}

TEST_CASE("clone keeps tied parameters tied", "[nn]") {
  LanguageModel model(/*tied=*/true);
  CHECK(model->head->weight.is_same(model->wte->weight));
  LanguageModel copy = cloned(model);
  REQUIRE(copy);
  CHECK(copy->head->weight.is_same(copy->wte->weight));
  CHECK(copy->named_parameters()["head.weight"].is_same(copy->wte->weight));
  CHECK(at::equal(copy->wte->weight, model->wte->weight));
  CHECK_FALSE(copy->wte->weight.is_same(model->wte->weight));
  CHECK_FALSE(cloned(LanguageModel(false))->head->weight.is_same(copy->wte->weight));
}

TEST_CASE("clone keeps ties that were made after construction, within stock containers", "[nn]") {
  tessera::nn::Linear first(3, 3), second(3, 3);
  tessera::tie_parameter(*second, "weight", first->weight);
  torch::nn::Sequential chain(first, second);
  const auto copy = tessera::clone_module(*chain);
  const auto parameters = copy->named_parameters();
  CHECK(parameters["0.weight"].is_same(parameters["1.weight"]));
  CHECK_FALSE(parameters["0.bias"].is_same(parameters["1.bias"]));
  CHECK(copy->children()[1]->as<tessera::nn::Linear>()->weight.is_same(parameters["0.weight"]));
  const at::Tensor x = at::ones({1, 3});
  CHECK(at::equal(copy->as<torch::nn::Sequential>()->forward(x), chain->forward(x)));
}

TEST_CASE("a clone's parameters are frozen where the module's are", "[nn]") {
  LanguageModel model(/*tied=*/true);
  model->wte->weight.set_requires_grad(false);
  CHECK_FALSE(cloned(model)->head->weight.requires_grad());
  torch::nn::Sequential chain(tessera::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  chain->named_parameters()["1.bias"].set_requires_grad(false);
  std::vector<bool> needs_grad;
  for (const auto& parameter : tessera::clone_module(*chain)->parameters()) {
    needs_grad.push_back(parameter.requires_grad());
  }
  CHECK(needs_grad == std::vector{true, true, true, false});
}

TEST_CASE("clone copies an embedding that was made of a given tensor", "[nn]") {
  const at::Tensor table = at::ones({3, 2});
  torch::nn::Sequential chain(tessera::nn::Embedding::from_pretrained(table),
                              torch::nn::EmbeddingBag::from_pretrained(table.clone()));
  const auto first = tessera::clone_module(*chain);
  const auto second = tessera::clone_module(*first);
  const auto sources = chain->parameters(), copies = first->parameters(), copies_again = second->parameters();
  for (size_t i = 0; i < 2; ++i) {
    for (const auto& weight : {sources[i], copies[i], copies_again[i]}) {
      CHECK_FALSE(weight.requires_grad());
      CHECK(at::equal(weight, table));
    }
    CHECK_FALSE(copies[i].is_alias_of(sources[i]));
    CHECK_FALSE(copies_again[i].is_alias_of(sources[i]));
    CHECK_FALSE(copies_again[i].is_alias_of(copies[i]));
  }
  CHECK(chain->ptr(0)->as<tessera::nn::Embedding>()->options._weight().is_same(table));
}

TEST_CASE("clone of nested containers and of recurrent layers", "[nn]") {
  tessera::nn::Sequential inner(tessera::nn::Linear(3, 3), tessera::nn::Linear(3, 2));
  tessera::nn::Sequential outer({{"inner", inner}, {"out", tessera::nn::Linear(2, 1)}});
  tessera::nn::Sequential copy = cloned(outer);
  REQUIRE(copy);
  const at::Tensor x = at::ones({1, 3});
  CHECK(at::equal(copy(x), outer(x)));
  CHECK(copy->named_parameters().keys() == outer->named_parameters().keys());
  for (const auto& parameter : copy->parameters()) const_cast<at::Tensor&>(parameter).data().zero_();
  CHECK(copy(x).item<double>() == 0);
  CHECK(outer->parameters()[0].abs().sum().item<double>() > 0);

  tessera::nn::LSTM lstm(3, 4);
  tessera::nn::LSTM lstm_copy = cloned(lstm);
  const at::Tensor sequence = at::ones({5, 2, 3});
  CHECK(at::equal(std::get<0>(lstm_copy(sequence)), std::get<0>(lstm(sequence))));
}

TEST_CASE("a layer that stands several times in chains is one layer in the copy", "[nn]") {
  tessera::nn::Linear shared(3, 3);
  tessera::nn::Sequential inner({{"a", shared}, {"b", tessera::nn::Linear(3, 3)}, {"c", shared}});
  tessera::nn::Sequential outer({{"first", shared}, {"inner", inner}, {"again", inner}});
  tessera::nn::Sequential copy = cloned(outer);
  REQUIRE(copy);
  CHECK(copy->modules().size() == outer->modules().size());
  CHECK(copy[1] == copy[2]);
  CHECK(copy->at<tessera::nn::Sequential::Impl>(1)[2] == copy[0]);
  CHECK(copy[0] != outer[0]);
  const at::Tensor x = at::ones({1, 3});
  CHECK(at::equal(copy(x), outer(x)));
  CHECK(cloned(outer)[0] != copy[0]);

  torch::nn::Sequential stock(inner, outer);
  const auto both = tessera::clone_module(*stock)->children();
  CHECK(both[0]->children()[0] == both[1]->children()[0]);
}

TEST_CASE("clone refuses what it would get wrong", "[nn]") {
  using tessera::NotImplementedError;
  LanguageModel model;
  model->head->attach(std::make_shared<int>(1));
  CHECK_THROWS_AS(model->clone(), NotImplementedError);
  CHECK_THROWS_WITH(model->clone(), Catch::Contains("clone: torch::nn::LinearImpl has hooks or state attached") &&
                                        Catch::Contains("before it is sharded"));
  model->head->detach<int>();
  CHECK(cloned(model));

  model->head->weight = model->wte->weight;
  CHECK_THROWS_WITH(model->clone(), Catch::Contains("the member weight of torch::nn::LinearImpl") &&
                                        Catch::Contains("tessera::tie_parameter"));

  CHECK_THROWS_WITH(Plain()->clone(), Catch::Contains("clone_test::PlainImpl has no clone"));
  CHECK_THROWS_AS(Narrow(2, 2)->clone(), NotImplementedError);
  torch::nn::ModuleList list;
  list->push_back(Plain());
  CHECK_THROWS_AS(tessera::clone_module(*list), NotImplementedError);

  tessera::nn::Linear ours(2, 2);
  torch::nn::Linear stock(2, 2);
  stock->named_parameters();
  torch::nn::Sequential chain(ours, stock);
  tessera::tie_parameter(*ours, "weight", stock->weight);
  CHECK_THROWS_WITH(tessera::clone_module(*chain),
                    Catch::Contains("0.weight and 1.weight are one tensor") && Catch::Contains("no hook point"));
}

TEST_CASE("tie_parameter checks its arguments", "[nn]") {
  tessera::nn::Linear linear(2, 2);
  CHECK_THROWS_AS(tessera::tie_parameter(*linear, "gain", linear->weight), tessera::KeyError);
  CHECK_THROWS_AS(tessera::tie_parameter(*linear, "weight", at::ones({3})), tessera::ValueError);
  CHECK_THROWS_AS(tessera::tie_parameter(*torch::nn::Linear(2, 2), "weight", linear->weight), tessera::StateError);
  CHECK_THROWS_AS(tessera::tie_parameter(*tessera::nn::LSTM(2, 2), "weight_ih_l0", at::ones({8, 2})),
                  tessera::KeyError);
}

}  // namespace clone_test
