#include "parallel/distribute_module.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <fmt/ranges.h>
#include <torch/optim/adam.h>

#include "base/error.h"
#include "nn/modules.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

nn::Linear filled_linear() {
  auto generator = make_generator(3);
  nn::Linear linear(5, 3);
  const torch::NoGradGuard no_grad;
  linear->weight.copy_(at::randn({3, 5}, generator));
  linear->bias.copy_(at::randn({3}, generator));
  return linear;
}

at::Tensor linear_input() {
  auto generator = make_generator(4);
  return at::randn({4, 5}, generator);
}

}  // namespace

TEST_CASE("a module whose weight is cut trains as a plain one", "[parallel]") {
  auto reference = filled_linear();
  torch::optim::Adam reference_optimizer(reference->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    reference_optimizer.zero_grad();
    reference(linear_input()).square().sum().backward();
    reference_optimizer.step();
  }
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      auto linear = filled_linear();
      torch::optim::Adam optimizer(linear->parameters(), 0.1);
      const auto weight = linear->weight;
      distribute_module(
          linear, mesh,
          {.partition_fn = [](const std::string&, torch::nn::Module& module,
                              const DeviceMesh& on) { distribute_parameter(module, "weight", on, {Shard(0)}); },
           .input_fn = [](torch::nn::Module&, TensorRefs inputs,
                          const DeviceMesh& on) { *inputs[0] = from_local(*inputs[0], on, {Replicate()}); },
           .output_fn = [](torch::nn::Module&, TensorRefs outputs,
                           const DeviceMesh&) { *outputs[0] = full_tensor(*outputs[0]); }});
      TESSERA_EXPECT(weight.is_same(linear->weight));
      expect_equal(to_string(placements(linear->weight)), "(Shard(0))");
      expect_equal(to_string(placements(linear->bias)), "(Replicate())");
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        linear(linear_input()).square().sum().backward();
        optimizer.step();
      }
      expect_close(full_tensor(linear->weight).detach(), reference->weight.detach());
      expect_close(full_tensor(linear->bias).detach(), reference->bias.detach());
    });
  }
}

TEST_CASE("a module that is there under two names is distributed once", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto shared = filled_linear();
    torch::nn::ModuleList model;
    model->push_back(shared.ptr());
    model->push_back(shared.ptr());
    std::vector<std::string> names;
    distribute_module(model, mesh,
                      {.partition_fn = [&](const std::string& name, torch::nn::Module& module, const DeviceMesh& on) {
                        names.push_back(name);
                        if (&module == shared.get()) {
                          distribute_parameter(module, "weight", on, {Shard(0)});
                        }
                      }});
    expect_equal(fmt::format("{}", fmt::join(names, ", ")), std::string(", 0"));
    expect_equal(to_string(placements(shared->weight)), "(Shard(0))");
  });
}

TEST_CASE("distribute_module names what does not fit", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto linear = filled_linear();
    expect_throws<KeyError>(
        [&] { distribute_parameter(*linear, "wieght", mesh, {Shard(0)}); },
        "distribute_parameter: torch::nn::LinearImpl has no parameter or buffer \"wieght\"; it has: weight, bias");
    distribute_parameter(*linear, "weight", mesh, {Shard(0)});
    expect_throws<ValueError>([&] { distribute_parameter(*linear, "weight", mesh, {Shard(0)}); }, "\"weight\" of");
    auto trained = filled_linear();
    trained->weight.sum().backward();
    expect_throws<StateError>([&] { distribute_module(trained, mesh); }, "call zero_grad() before");
    expect_throws<StateError>([&] { distribute_parameter(*trained, "weight", mesh, {Shard(0)}); }, "has a gradient");
    TESSERA_EXPECT(!is_dtensor(trained->bias));
    torch::nn::Linear stock(2, 2);
    expect_throws<StateError>(
        [&] { distribute_module(stock, mesh, {.input_fn = [](torch::nn::Module&, TensorRefs, const DeviceMesh&) {}}); },
        "distribute_module");
  });
}

}  // namespace tessera
