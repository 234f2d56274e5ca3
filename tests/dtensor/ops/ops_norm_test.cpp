#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/glu.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/softmax.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>

#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

TEST_CASE("softmax and gates", "[dtensor][ops]") {
  std::vector<OpCase> cases;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 4}, {1, 2}}) {
    cases.push_back({.name = "softmax", .inputs = {{sizes}}, .call = [](const Tensors& x) -> Tensors {
                       return {at::softmax(x[0], -1)};
                     }});
    cases.push_back({.name = "log_softmax over rows", .inputs = {{sizes}}, .call = [](const Tensors& x) -> Tensors {
                       return {at::log_softmax(x[0], 0)};
                     }});
    cases.push_back(
        {.name = "glu", .inputs = {{sizes}}, .call = [](const Tensors& x) -> Tensors { return {at::glu(x[0], 1)}; }});
  }
  CHECK_NOTHROW(check_ops(cases));
}

TEST_CASE("normalisations", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "layer_norm",
       .inputs = {{{5, 3}}, {{3}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::layer_norm(x[0], {3}, x[1], x[2])}; }},
      {.name = "layer_norm of few items",
       .inputs = {{{1, 2, 3}}, {{3}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::layer_norm(x[0], {3}, x[1], x[2])}; }},
      {.name = "layer_norm over two dims, without bias",
       .inputs = {{{5, 2, 3}}, {{2, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::layer_norm(x[0], {2, 3}, x[1])};
       }},
      {.name = "layer_norm without weight",
       .inputs = {{{5, 3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::layer_norm(x[0], {3})}; }},
      {.name = "rms_norm",
       .inputs = {{{5, 3}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::rms_norm(x[0], {3}, x[1], 1e-5)}; }},
      {.name = "the rms_norm that CUDA tensors take",
       .inputs = {{{5, 3}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {std::get<0>(at::_fused_rms_norm(x[0], {3}, x[1], 1e-5))}; }},
      {.name = "rms_norm of three dims",
       .inputs = {{{2, 5, 3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::rms_norm(x[0], {3}, {}, 1e-5)}; }},
      {.name = "group_norm",
       .inputs = {{{3, 4, 5}}, {{4}}, {{4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::group_norm(x[0], 2, x[1], x[2])}; }},
      {.name = "group_norm without weight",
       .inputs = {{{2, 4, 3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::group_norm(x[0], 4)}; }},
  }));
}

TEST_CASE("group norms of 16 bits save means of the dtype that their kernel gives", "[dtensor][ops]") {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    run_ranks_on_devices(2, [&](int, c10::Device device) {
      const auto mesh = init_device_mesh(device.type(), {2});
      const auto make = [&](at::IntArrayRef sizes) {
        return at::arange(c10::multiply_integers(sizes), at::TensorOptions(device).dtype(at::kFloat))
            .sin()
            .view(sizes)
            .to(dtype);
      };
      const auto x = make({3, 4, 5}), weight = make({4}), bias = make({4});
      const auto grads = [](at::Tensor out, const std::vector<at::Tensor>& inputs) {
        return torch::autograd::grad({(out * out).sum()}, inputs);
      };
      std::vector<at::Tensor> plain, cut;
      for (const auto& tensor : {x, weight, bias}) {
        plain.push_back(tensor.clone().requires_grad_());
        cut.push_back(
            distribute_tensor(tensor, mesh, {tensor.dim() == 3 ? Placement(Shard(0)) : Replicate()}).requires_grad_());
      }
      const auto expected = at::group_norm(plain[0], 2, plain[1], plain[2]);
      const auto actual = at::group_norm(cut[0], 2, cut[1], cut[2]);
      expect_close(full_tensor(actual).cpu(), expected.cpu(), {.rtol = 0, .atol = 0});
      const auto expected_grads = grads(expected, plain), actual_grads = grads(actual, cut);
      for (size_t i = 0; i < plain.size(); ++i) {
        expect_close(full_tensor(actual_grads[i]).cpu(), expected_grads[i].cpu(), {.rtol = 2e-2, .atol = 2e-2});
      }
    });
  }
}

TEST_CASE("a BatchNorm module trains on a cut batch, and refuses one value a channel", "[dtensor][ops]") {
  const auto batch = [](int step) { return at::randn({5, 3}, make_generator(static_cast<uint64_t>(step))).add(step); };
  const auto train_three_steps = [&](torch::nn::BatchNorm1d& norm, const std::function<at::Tensor(at::Tensor)>& place) {
    for (int step = 0; step < 3; ++step) {
      norm->forward(place(batch(step))).sin().sum().backward();
      at::NoGradGuard no_grad;
      for (auto* parameter : {&norm->weight, &norm->bias}) {
        parameter->sub_(parameter->grad(), 0.1);
        parameter->mutable_grad().reset();
      }
    }
    expect_throws<c10::Error>(
        [&] {
          norm->forward(place(at::ones({1, 3})));
        },
        "Expected more than 1 value per channel");
  };
  for (const std::optional<double> momentum : {std::optional<double>(0.1), std::optional<double>()}) {
    const auto options = torch::nn::BatchNorm1dOptions(3).momentum(momentum);
    torch::nn::BatchNorm1d plain(options);
    train_three_steps(plain, [](at::Tensor x) { return x; });
    run_ranks(3, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {3});
      torch::nn::BatchNorm1d norm(options);
      for (auto* tensor : {&norm->weight, &norm->bias, &norm->running_mean, &norm->running_var}) {
        *tensor = distribute_tensor(tensor->detach(), mesh, {Replicate()}).requires_grad_(tensor->requires_grad());
      }
      train_three_steps(norm, [&](at::Tensor x) { return distribute_tensor(x, mesh, {Shard(0)}); });
      expect_close(full_tensor(norm->weight.detach()), plain->weight.detach());
      expect_close(full_tensor(norm->bias.detach()), plain->bias.detach());
      expect_close(full_tensor(norm->running_mean), plain->running_mean);
      expect_close(full_tensor(norm->running_var), plain->running_var);
    });
  }
}

}  // namespace tessera
