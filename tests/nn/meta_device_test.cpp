// Modules without memory, and how they get their values.

#include "nn/meta_device.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/rnn.h>
#include <torch/utils.h>

#include "base/error.h"
#include "nn/embedding.h"
#include "nn/linear.h"
#include "nn/reset_parameters.h"
#include "nn/rms_norm.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

struct ScaleImpl : torch::nn::Module, ResettableParameters {
  ScaleImpl() {
    scale = register_parameter("scale", torch::empty({3}));
    reset_parameters();
  }
  void reset_parameters() override {
    const torch::NoGradGuard no_grad;
    scale.fill_(0.5);
  }
  at::Tensor forward(const at::Tensor& x) { return x * scale; }

  at::Tensor scale;
};
TESSERA_MODULE(Scale);

/// One layer of each kind that a sum of parameters can tell apart.
struct ZooImpl : torch::nn::Module {
  ZooImpl() {
    embedding = register_module("embedding", tessera::nn::Embedding(7, 3));
    linear = register_module("linear", tessera::nn::Linear(3, 4));
    conv = register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(2, 3, 2)));
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    rms = register_module("rms", tessera::nn::RMSNorm(tessera::nn::RMSNormOptions(3)));
    lstm = register_module("lstm", torch::nn::LSTM(3, 2));
    scale = register_module("scale", Scale());
  }

  tessera::nn::Embedding embedding{nullptr};
  tessera::nn::Linear linear{nullptr};
  torch::nn::Conv1d conv{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  tessera::nn::RMSNorm rms{nullptr};
  torch::nn::LSTM lstm{nullptr};
  Scale scale{nullptr};
};

/// Builds a child, then draws a parameter of its own; takes the child's bias for its own business.
struct ShiftedImpl : torch::nn::Module, ResettableParameters {
  ShiftedImpl() {
    linear = register_module("linear", tessera::nn::Linear(3, 4));
    shift = register_parameter("shift", torch::empty({4}));
    ShiftedImpl::reset_parameters();
  }
  void reset_parameters() override {
    const torch::NoGradGuard no_grad;
    shift.normal_();
    linear->bias.fill_(0.25);
  }

  tessera::nn::Linear linear{nullptr};
  at::Tensor shift;
};

}  // namespace

TEST_CASE("inside of the guard factories without a device make tensors on meta", "[meta_device]") {
  {
    const MetaDeviceGuard on_meta;
    { const MetaDeviceGuard nested; }
    CHECK(at::ones({3}).is_meta());
    CHECK(torch::randn({3}, at::kDouble).is_meta());
    CHECK(at::arange(5).sizes() == at::IntArrayRef({5}));
    CHECK(at::empty({3}, at::kCPU).is_cpu());
    const auto on_cpu = at::ones({3}, at::kCPU);
    CHECK((on_cpu + 1).is_cpu());
    CHECK(at::empty_like(on_cpu).is_cpu());
    CHECK(on_cpu.clone().is_cpu());
    CHECK_THROWS_AS(at::tensor({1.0, 2.0}), c10::Error);
    tessera::nn::Linear linear(1 << 20, 1 << 20);
    CHECK(linear->weight.is_meta());
    CHECK(linear->weight.requires_grad());
  }
  CHECK(at::ones({3}).is_cpu());
}

TEST_CASE("making modules without memory draws no random numbers", "[meta_device]") {
  const auto draw = [](bool builds) {
    at::manual_seed(3);
    if (builds) {
      const MetaDeviceGuard on_meta;
      const ZooImpl zoo;
    }
    return at::randn({4});
  };
  CHECK(draw(true).equal(draw(false)));
}

TEST_CASE("reset_parameters gives the values of the constructor", "[meta_device]") {
  at::manual_seed(5);
  ZooImpl built;
  ZooImpl again;
  at::manual_seed(5);
  reset_parameters(again);
  const auto expected = built.named_parameters(), actual = again.named_parameters();
  REQUIRE(expected.size() == actual.size());
  for (const auto& item : expected) {
    CAPTURE(item.key());
    CHECK(actual[item.key()].equal(item.value()));
  }
  for (const auto& item : built.named_buffers()) {
    CAPTURE(item.key());
    CHECK(again.named_buffers()[item.key()].equal(item.value()));
  }
}

TEST_CASE("a module is reset after its children, which it may set anew", "[meta_device]") {
  at::manual_seed(5);
  const ShiftedImpl built;
  ShiftedImpl again;
  at::manual_seed(5);
  reset_parameters(again);
  CHECK(again.linear->weight.equal(built.linear->weight));
  CHECK(again.shift.equal(built.shift));
  CHECK(again.linear->bias.equal(torch::full({4}, 0.25)));
}

TEST_CASE("reset_parameters refuses what it cannot do before it changes anything", "[meta_device]") {
  torch::nn::Module model;
  auto linear = model.register_module("linear", torch::nn::Linear(2, 2));
  model.register_module("attention", torch::nn::MultiheadAttention(2, 1));
  const auto before = linear->weight.detach().clone();
  CHECK_THROWS_WITH(reset_parameters(model),
                    Catch::Contains("at 'attention' has 'in_proj_weight'") && Catch::Contains("ResettableParameters"));
  CHECK(linear->weight.equal(before));
  const MetaDeviceGuard on_meta;
  torch::nn::Linear meta(2, 2);
  CHECK_THROWS_AS(reset_parameters(*meta), StateError);
}

}  // namespace tessera
