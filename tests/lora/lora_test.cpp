#include "lora/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "activation_checkpoint/checkpoint.h"
#include "debug/comm_debug_mode.h"
#include "dtensor/random/random.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/replicate.h"
#include "fully_shard/to_empty.h"
#include "nn/linear.h"
#include "nn/meta_device.h"
#include "optim/fused_optimizers.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"
#include "testing/expect.h"
#include "testing/fixtures.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// Of sizes that 2 and 3 ranks do not divide.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    up = register_module("up", nn::Linear(5, 11));
    down = register_module("down", nn::Linear(11, 5));
    head = register_module("head", nn::Linear(5, 3));
  }
  at::Tensor forward(at::Tensor x) { return head(x + down(up(x).relu())); }

  nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
};
TESSERA_MODULE(Net);

/// A layer that libtorch's own code calls.
struct StockNetImpl : torch::nn::Module {
  StockNetImpl() { register_module("up", torch::nn::Linear(2, 3)); }
};
TORCH_MODULE(StockNet);

const LoraConfig kConfig{.target_modules = {"up", "down"}, .r = 3, .lora_alpha = 4};

/// Makes adapters that do something.
void fill_adapters(Net& net) {
  for (auto& layer : lora_layers(net)) {
    fill_parameters(*layer.module->named_children()["lora_A"], 2);
    fill_parameters(*layer.module->named_children()["lora_B"], 3);
  }
}

/// Net in float64 with adapters.
Net make_net(const LoraConfig& config = kConfig) {
  Net net;
  net->to(at::kDouble);
  fill_parameters(*net, 1);
  add_lora(net, config);
  fill_adapters(net);
  return net;
}

at::Tensor make_input() {
  return at::randn({6, 5}, make_generator(4), at::kDouble);
}

/// Gradients of the adapters, whole, by name.
std::vector<std::pair<std::string, at::Tensor>> adapter_gradients(const Net& net) {
  std::vector<std::pair<std::string, at::Tensor>> gradients;
  for (const auto& item : net->named_parameters()) {
    TESSERA_EXPECT(item.value().requires_grad() == is_lora_parameter(item.key()));
    TESSERA_EXPECT(item.value().grad().defined() == item.value().requires_grad());
    if (item.value().requires_grad()) {
      gradients.emplace_back(item.key(), item.value().grad());
    }
  }
  return gradients;
}

/// Trains both on `input`, with all of it on each rank.
void expect_same_training(Net& plain, Net& sharded, const at::Tensor& input) {
  const auto options = torch::optim::AdamWOptions(0.02).eps(1e-3);
  optim::FusedAdamW plain_optimizer(plain->parameters(), options), optimizer(sharded->parameters(), options);
  for (int step = 0; step < 3; ++step) {
    plain_optimizer.zero_grad();
    optimizer.zero_grad();
    const auto expected = plain(input), actual = sharded(input);
    expect_close(actual, expected);
    weighted_loss(expected).backward();
    weighted_loss(actual).backward();
    const auto wanted = adapter_gradients(plain), gradients = adapter_gradients(sharded);
    expect_equal(gradients.size(), wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      expect_close(gradients[i].second, wanted[i].second, {.rtol = 1e-8, .atol = 1e-10});
    }
    plain_optimizer.step();
    optimizer.step();
  }
}

std::vector<std::string> names_of(const Net& net) {
  std::vector<std::string> names;
  for (const auto& item : net->named_parameters()) {
    names.push_back(item.key());
  }
  return names;
}

ParallelPlan net_plan() {
  return {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};
}

}  // namespace

TEST_CASE("an adapter adds its product, and alone trains") {
  auto net = make_net();
  CHECK(names_of(net) == std::vector<std::string>{"up.weight", "up.bias", "up.lora_A.weight", "up.lora_B.weight",
                                                  "down.weight", "down.bias", "down.lora_A.weight",
                                                  "down.lora_B.weight", "head.weight", "head.bias"});
  const auto parameters = net->named_parameters();
  const auto& a = parameters["up.lora_A.weight"];
  const auto& b = parameters["up.lora_B.weight"];
  CHECK(a.sizes() == at::IntArrayRef{3, 5});
  CHECK(b.sizes() == at::IntArrayRef{11, 3});
  const auto x = make_input();
  const auto frozen = at::linear(x, net->up->weight, net->up->bias);
  expect_close(net->up(x), frozen + 4.0 / 3 * x.matmul(a.t()).matmul(b.t()));
  weighted_loss(net(x)).backward();
  CHECK(adapter_gradients(net).size() == 4);

  auto root = kConfig;
  root.use_rslora = true;
  auto by_root = make_net(root);
  expect_close(by_root->up(x), frozen + 4 / std::sqrt(3.0) * x.matmul(a.t()).matmul(b.t()));
}

TEST_CASE("a new adapter changes no bit of the result") {
  Net net;
  const auto x = at::randn({6, 5}, make_generator(4));
  const auto before = net(x);
  add_lora(net, {.target_modules = {"*"}, .r = 2});
  expect_bit_equal(net(x), before);
  CHECK(lora_layers(net).size() == 3);
  const auto a = net->named_parameters()["up.lora_A.weight"];
  CHECK(a.abs().max().item<double>() <= 1 / std::sqrt(5.0));
  CHECK(a.std().item<double>() > 0.1);
}

TEST_CASE("patterns match the ends of paths") {
  const auto layers = [](const std::vector<std::string>& patterns) {
    struct OuterImpl : torch::nn::Module {
      OuterImpl() {
        register_module("0", Net());
        register_module("1", Net());
      }
    };
    const auto outer = std::make_shared<OuterImpl>();
    add_lora(outer, {.target_modules = patterns});
    std::vector<std::string> paths;
    for (const auto& layer : lora_layers(outer)) {
      paths.push_back(layer.path);
    }
    return paths;
  };
  using Paths = std::vector<std::string>;
  CHECK(layers({"up"}) == Paths{"0.up", "1.up"});
  CHECK(layers({"*.up", "1.d*"}) == Paths{"0.up", "1.up", "1.down"});
  CHECK(layers({"0.[ud]*"}) == Paths{"0.up", "0.down"});
}

TEST_CASE("adapters of a bfloat16 layer are float32, and so is their term") {
  nn::Linear linear(7, 4);
  linear->to(at::kBFloat16);
  struct HolderImpl : torch::nn::Module {
    explicit HolderImpl(const nn::Linear& linear) { register_module("linear", linear); }
  };
  const auto holder = std::make_shared<HolderImpl>(linear);
  add_lora(holder, {.target_modules = {"linear"}});
  const auto adapter = lora_layers(holder)[0].adapter;
  CHECK(adapter->lora_A->weight.scalar_type() == at::kFloat);
  const nn::LoraMatrix b = adapter->lora_B;
  fill_parameters(*b.ptr(), 5);
  const auto x = at::randn({3, 7}, make_generator(6)).to(at::kBFloat16);
  const auto base = at::linear(x, linear->weight, linear->bias);
  const auto term = at::linear(at::linear(x.to(at::kFloat), adapter->lora_A->weight), b->weight);
  expect_bit_equal(linear(x), (base + term).to(at::kBFloat16));
  const auto wanted = (linear->weight + adapter->product()).to(at::kBFloat16);
  merge_lora(holder);
  expect_bit_equal(linear->weight, wanted);
}

TEST_CASE("dropout is of training alone") {
  auto config = kConfig;
  config.lora_dropout = 0.5;
  auto net = make_net(config), same = make_net();
  const auto x = make_input();
  CHECK_FALSE(net(x).equal(net(x)));
  net->eval();
  expect_bit_equal(net(x), same(x));
}

TEST_CASE("an adapter is inside of the layer's hooks and of its recomputation, whenever they come") {
  const auto x = make_input();
  const auto expected = -make_net()->up(2 * x);
  for (const bool is_first : {true, false}) {
    Net net;
    net->to(at::kDouble);
    fill_parameters(*net, 1);
    const auto add_hooks = [&] {
      net->up->register_forward_pre_hook([](HookPoint&, TensorRefs inputs) { *inputs[0] = 2 * *inputs[0]; });
      net->up->register_forward_hook([](HookPoint&, TensorRefs outputs) { *outputs[0] = -*outputs[0]; });
      checkpoint_module(net->up);
    };
    if (is_first) {
      add_hooks();
    }
    add_lora(net, kConfig);
    fill_adapters(net);
    if (!is_first) {
      add_hooks();
    }
    const auto actual = net->up(x);
    expect_bit_equal(actual, expected);
    weighted_loss(actual).backward();
    CHECK(net->named_parameters()["up.lora_A.weight"].grad().abs().max().item<double>() > 0);
  }
}

TEST_CASE("add_lora names what it cannot adapt, and changes nothing then") {
  Net net;
  const auto expect_refused = [&]<class Failure>(Failure, LoraConfig config, const char* part) {
    expect_throws<Failure>([&] { add_lora(net, config); }, part);
    CHECK(names_of(net).size() == 6);
    CHECK(net->up->weight.requires_grad());
  };
  expect_refused(KeyError(""), {.target_modules = {"up", "dwon"}},
                 "target_modules has \"dwon\", which matches none of the 3 linear layers; close ones: \"down\"");
  expect_refused(KeyError(""), {.target_modules = {"attention"}}, "their names: down, head, up");
  expect_refused(KeyError(""), {.target_modules = {""}}, "matches none");
  expect_refused(ValueError(""), {}, "target_modules is empty");
  expect_refused(ValueError(""), {.target_modules = {"up"}, .r = 0}, "r is 0; it must be at least 1");
  expect_refused(ValueError(""), {.target_modules = {"up"}, .lora_alpha = -1}, "lora_alpha is -1");
  expect_refused(ValueError(""), {.target_modules = {"up"}, .lora_dropout = 1}, "lora_dropout is 1");
  expect_throws<StateError>([&] { merge_lora(net); }, "NetImpl has no adapters");
  {
    Net tied;
    tie_parameter(*tied->down, "bias", tied->head->register_parameter("other", at::randn({5})));
    add_lora(tied, {.target_modules = {"down"}});  // a shared bias is not touched
    Net shared;
    shared->head->register_parameter("other", shared->up->weight);
    expect_throws<ValueError>([&] { add_lora(shared, kConfig); }, "the weight of \"up\" is another module's too");
  }
  StockNet stock;
  expect_throws<StateError>([&] { add_lora(stock, {.target_modules = {"up"}}); },
                            "\"up\" is a torch::nn::LinearImpl, and only a tessera::nn::Linear takes an adapter");
  add_lora(net, {.target_modules = {"up"}});
  expect_throws<StateError>([&] { add_lora(net, {.target_modules = {"head"}}); },
                            "\"up\" has an adapter already; call merge_lora first");
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    Net sharded, copied, cut;
    fully_shard(sharded, {.mesh = mesh});
    replicate(copied, {.mesh = mesh});
    parallelize_module(cut, mesh, net_plan());
    for (auto& each : {sharded, copied, cut}) {
      expect_throws<StateError>([&] { add_lora(each, kConfig); }, "\"up\" is sharded already; call add_lora before");
    }
  });
}

TEST_CASE("tensor-parallel adapters train like plain ones, and forward sends nothing more") {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      auto plain = make_net(), cut = make_net();
      parallelize_module(cut, mesh, net_plan());
      const auto placement = [&](const char* name) { return to_string(placements(cut->named_parameters()[name])); };
      expect_equal(placement("up.lora_A.weight"), to_string({Replicate()}));
      expect_equal(placement("up.lora_B.weight"), to_string({Shard(0)}));
      expect_equal(placement("down.lora_A.weight"), to_string({Shard(1)}));
      expect_equal(placement("down.lora_B.weight"), to_string({Replicate()}));
      expect_same_training(plain, cut, make_input());
      const at::NoGradGuard no_grad;
      const CommDebugMode mode;
      cut(make_input());
      expect_equal(mode.calls(), 1);  // the sum of `down`
    });
  }
}

TEST_CASE("adapters in units train like plain ones, and only their gradients are sent") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"dp"});
    auto plain = make_net(), sharded = make_net();
    checkpoint_module(sharded->up);
    fully_shard(sharded->up, {.mesh = mesh});
    fully_shard(sharded, {.mesh = mesh});
    expect_same_training(plain, sharded, make_input());
    const CommDebugMode mode;
    weighted_loss(sharded(make_input())).backward();
    expect_equal(mode.calls(Collective::ReduceScatter), 2);
    int64_t bytes = 0;
    for (const auto& [key, entry] : mode.entries()) {
      bytes += key.collective == Collective::ReduceScatter ? entry.bytes_sent : 0;
    }
    // A rank's rows of A and B are 1 * 5 + 4 * 3 elements in `up`, and 1 * 11 + 2 * 3 in `down`: 17, padded to 64
    // bytes. Each of the two units reduces three such parts.
    expect_equal(bytes, 2 * 3 * 24 * 8);
  });
  run_ranks(2, [](int) {
    auto plain = make_net(), copied = make_net();
    replicate(copied, {.mesh = init_device_mesh(at::kCPU, {2}, {"dp"})});
    expect_same_training(plain, copied, make_input());
  });
}

TEST_CASE("a unit gathers bfloat16 layers and float32 adapters at once, and may compute in bfloat16") {
  run_ranks(2, [](int) {
    const auto make = [] {
      Net net;
      fill_parameters(*net, 1);
      net->to(at::kBFloat16);
      add_lora(net, kConfig);
      fill_adapters(net);
      return net;
    };
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    auto plain = make(), sharded = make(), low = make();
    fully_shard(sharded, {.mesh = mesh});
    fully_shard(low, {.mesh = mesh, .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    const auto x = make_input().to(at::kBFloat16);
    const CommDebugMode mode;
    const auto expected = plain(x), actual = sharded(x);
    expect_equal(mode.calls(Collective::AllGather), 1);
    expect_bit_equal(actual, expected);
    weighted_loss(expected.to(at::kFloat)).backward();
    weighted_loss(actual.to(at::kFloat)).backward();
    weighted_loss(low(x).to(at::kFloat)).backward();
    const auto wanted = adapter_gradients(plain), gradients = adapter_gradients(sharded),
               rough = adapter_gradients(low);
    for (size_t i = 0; i < wanted.size(); ++i) {
      expect_close(gradients[i].second, wanted[i].second);
      expect_close(rough[i].second, wanted[i].second, {.rtol = 0.1, .atol = 0.02});  // Float too
    }
  });
}

TEST_CASE("a merged model computes the same without adapters, sharded or not") {
  const auto x = make_input();
  const auto expected = make_net()(x);
  auto net = make_net();
  merge_lora(net);
  expect_close(net(x), expected);
  CHECK(names_of(net).size() == 6);
  const auto expect_merged = [&](Net& sharded) {
    expect_close(sharded(x), expected);  // leaves the outermost unit's parameters whole
    merge_lora(sharded);
    expect_equal(names_of(sharded).size(), 6U);
    expect_close(sharded(x), expected);
    for (auto& parameter : sharded->parameters()) {
      parameter.set_requires_grad(true);
    }
    weighted_loss(sharded(x)).backward();
    expect_close(sharded->up->weight, net->up->weight);
    TESSERA_EXPECT(sharded->up->weight.grad().defined());
  };
  run_ranks(3, [&](int) {
    auto sharded = make_net();
    fully_shard(sharded->down, {.mesh = init_device_mesh(at::kCPU, {3}, {"dp"})});
    fully_shard(sharded, {.mesh = init_device_mesh(at::kCPU, {3}, {"dp"})});
    expect_merged(sharded);
  });
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto sharded = make_net();
    parallelize_module(sharded, mesh["tp"], net_plan());
    fully_shard(sharded, {.mesh = mesh["dp"]});
    expect_merged(sharded);
  });
}

TEST_CASE("adapters of a model without memory get the values of a single process") {
  run_ranks(2, [](int) {
    Net net{nullptr};
    {
      const MetaDeviceGuard on_meta;
      net = Net();
    }
    add_lora(net, kConfig);
    fully_shard(net, {.mesh = init_device_mesh(at::kCPU, {2}, {"dp"})});
    to_empty(net, at::kCPU);
    manual_seed(3);
    reset_lora(net);
    const auto generator = new_generator(at::kCPU, 3);
    const double bound = 1 / std::sqrt(5.0);
    const auto wanted = at::randn({3, 5}).uniform_(-bound, bound, generator);
    const auto parameters = net->named_parameters();
    expect_close(parameters["up.lora_A.weight"].detach(), wanted);
    expect_equal(full_tensor(parameters["up.lora_B.weight"].detach()).abs().sum().item<double>(), 0.0);
  });
}

}  // namespace tessera::testing
