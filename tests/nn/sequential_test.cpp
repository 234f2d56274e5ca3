#include "nn/sequential.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/pooling.h>

#include <catch2/catch.hpp>
#include <sstream>

#include "nn/activation.h"
#include "nn/linear.h"
#include "nn/rms_norm.h"

namespace {

using tessera::nn::Linear;
using tessera::nn::ReLU;
using tessera::nn::RMSNorm;
using tessera::nn::RMSNormOptions;
using tessera::nn::Sequential;

static_assert(tessera::nn::detail::TensorModule<Linear::Impl> &&
              tessera::nn::detail::TensorModule<torch::nn::LinearImpl>);
static_assert(!tessera::nn::detail::TensorModule<torch::nn::BilinearImpl>);
static_assert(tessera::detail::HasOneForward<Sequential::Impl>);

TEST_CASE("a Sequential nests, is named and indexed", "[nn]") {
  Sequential inner;
  inner->push_back("up", Linear(2, 3));
  inner->push_back(ReLU());
  Sequential outer({{"mlp", inner}, {"down", torch::nn::Linear(3, 1)}});
  outer->push_back(torch::nn::Sequential(Linear(1, 1)));
  CHECK(outer->size() == 3);
  CHECK(outer->named_parameters().keys() ==
        std::vector<std::string>{"mlp.up.weight", "mlp.up.bias", "down.weight", "down.bias", "2.0.weight", "2.0.bias"});
  CHECK(outer[0].get() == inner.get());
  CHECK(outer->at<torch::nn::LinearImpl>(1).weight.sizes() == at::IntArrayRef({1, 3}));
  std::vector<std::string> names;
  for (const auto& entry : *inner) names.push_back(entry.name());
  CHECK(names == std::vector<std::string>{"up", "1"});

  int calls = 0;
  inner->register_forward_hook([&](tessera::HookPoint&, tessera::TensorRefs) { ++calls; });
  at::Tensor x = at::ones({4, 2});
  at::Tensor expected = torch::relu(at::linear(x, inner->at<Linear::Impl>(0).weight, inner->at<Linear::Impl>(0).bias));
  expected = outer->at<torch::nn::LinearImpl>(1).forward(expected);
  expected = outer->at<torch::nn::SequentialImpl>(2).forward(expected);
  CHECK(at::equal(outer(x), expected));
  CHECK(calls == 1);
  torch::nn::Sequential stock(outer);
  CHECK(at::equal(stock->forward(x), expected));
  CHECK(calls == 2);
}

TEST_CASE("a Sequential refuses bad names, indices and null modules", "[nn]") {
  using tessera::ValueError;
  Sequential chain;
  CHECK_THROWS_AS(chain(at::ones({1})), ValueError);
  CHECK_THROWS_AS(chain->push_back(std::shared_ptr<torch::nn::LinearImpl>()), ValueError);
  chain->push_back("a", ReLU());
  CHECK_THROWS_AS(chain->push_back("a", ReLU()), ValueError);
  CHECK_THROWS_AS(chain->push_back("a.b", ReLU()), ValueError);
  CHECK_THROWS_WITH(chain->ptr(1), "Sequential: index 1, but there are 1 modules");
  CHECK_THROWS_AS(chain->at<torch::nn::LinearImpl>(0), ValueError);
  CHECK(chain->size() == 1);
}

TEST_CASE("RMSNorm divides by the root of the mean square", "[nn]") {
  RMSNorm norm(RMSNormOptions(2).eps(0.0));
  at::Tensor x = at::ones({1, 2}) * 7;
  x[0][1] = 1;
  CHECK(at::allclose(norm(x), x / 5));
  norm->weight.data().fill_(3);
  CHECK(at::allclose(norm(x), x * 0.6));
  norm(x).sum().backward();
  CHECK(at::allclose(norm->weight.grad(), (x / 5)[0]));

  RMSNorm copy = std::dynamic_pointer_cast<RMSNorm::Impl>(norm->clone());
  CHECK(at::equal(copy(x), norm(x)));
  norm->reset_parameters();
  CHECK(at::equal(norm->weight.detach(), at::ones({2})));

  RMSNorm plain(RMSNormOptions({2, 2}).elementwise_affine(false));
  CHECK(plain->parameters().empty());
  CHECK(at::allclose(plain(at::full({2, 2}, 4.0)), at::ones({2, 2})));
  std::ostringstream text;
  text << norm << plain;
  CHECK(text.str() ==
        "tessera::nn::RMSNorm([2], eps=0, elementwise_affine=true)"
        "tessera::nn::RMSNorm([2, 2], eps=none, elementwise_affine=false)");
  CHECK_THROWS_AS(RMSNorm(RMSNormOptions(std::vector<int64_t>{})), tessera::ValueError);
  CHECK_THROWS_AS(RMSNorm(RMSNormOptions(0)), tessera::ValueError);
}

}  // namespace
