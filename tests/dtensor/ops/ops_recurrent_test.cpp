// Recurrent layers of floats, for which ATen's lstm() calls a kernel of oneDNN on plain tensors of the CPU.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/gru.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/rnn.h>

#include "base/error.h"
#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

constexpr int64_t kFeatures = 3, kHidden = 4, kLength = 5, kItems = 3;

struct Network {
  const char* name;
  int64_t gates = 4;  // 3: a GRU
  int64_t layers = 1;
  bool bidirectional = false;
  bool batch_first = false;
  bool biases = true;
};

/// Input, the states, then the weights of each layer and direction.
Tensors network_inputs(const Network& network) {
  auto generator = make_generator(1);
  const auto draw = [&](std::vector<int64_t> sizes) { return at::randn(sizes, generator, at::kFloat) * 0.5; };
  const int64_t directions = network.bidirectional ? 2 : 1;
  const auto state = [&] { return draw({network.layers * directions, kItems, kHidden}); };
  Tensors inputs{network.batch_first ? draw({kItems, kLength, kFeatures}) : draw({kLength, kItems, kFeatures}),
                 state()};
  if (network.gates == 4) {
    inputs.push_back(state());
  }
  for (int64_t i = 0; i < network.layers * directions; ++i) {
    const int64_t rows = network.gates * kHidden;
    inputs.push_back(draw({rows, i < directions ? kFeatures : directions * kHidden}));
    inputs.push_back(draw({rows, kHidden}));
    for (int k = 0; network.biases && k < 2; ++k) {
      inputs.push_back(draw({rows}));
    }
  }
  return inputs;
}

Tensors run_network(const Network& network, const Tensors& x) {
  const at::TensorList all(x);
  if (network.gates == 3) {
    const auto [y, h] = at::gru(x[0], x[1], all.slice(2), network.biases, network.layers, 0, true,
                                network.bidirectional, network.batch_first);
    return {y, h};
  }
  const auto [y, h, c] = at::lstm(x[0], {x[1], x[2]}, all.slice(3), network.biases, network.layers, 0, true,
                                  network.bidirectional, network.batch_first);
  return {y, h, c};
}

/// Results, then gradients of all inputs.
Tensors results_of(const Network& network, const Tensors& inputs) {
  Tensors leaves;
  for (const auto& input : inputs) {
    leaves.push_back(input.detach().requires_grad_());
  }
  auto results = run_network(network, leaves);
  at::Tensor loss;
  for (const auto& result : results) {
    loss = loss.defined() ? loss + result.square().sum() : result.square().sum();
  }
  const auto gradients = torch::autograd::grad({loss}, leaves);
  results.insert(results.end(), gradients.begin(), gradients.end());
  return results;
}

/// Of inputs whose batch, or weights whose rows, are cut.
void check_network(const Network& network, const DeviceMesh& mesh, bool cut_items, bool cut_weights) {
  const auto inputs = network_inputs(network);
  Tensors placed;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const size_t states = network.gates == 4 ? 2 : 1;
    const Placement items = Shard(i == 0 && network.batch_first ? 0 : 1);
    const bool is_cut = i <= states ? cut_items : cut_weights;
    const Placement cut = i <= states ? items : Placement(Shard(0));
    placed.push_back(distribute_tensor(inputs[i], mesh, {is_cut ? cut : Placement(Replicate())}));
  }
  const auto expected = results_of(network, inputs), actual = results_of(network, placed);
  for (size_t i = 0; i < expected.size(); ++i) {
    expect_close(actual[i], expected[i].detach());
  }
  if (cut_items && !cut_weights) {
    expect_equal(to_string(placements(actual[0])), network.batch_first ? "(Shard(0))" : "(Shard(1))");
  }
  const at::NoGradGuard no_grad;
  expect_close(run_network(network, placed)[0], expected[0].detach());
}

}  // namespace

TEST_CASE("LSTM and GRU networks of floats", "[dtensor][ops]") {
  const std::vector<Network> networks = {
      {.name = "LSTM"},
      {.name = "LSTM of two layers in both directions", .layers = 2, .bidirectional = true},
      {.name = "LSTM, batch first, without biases", .batch_first = true, .biases = false},
      {.name = "GRU", .gates = 3, .layers = 2, .batch_first = true},
  };
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    for (const auto& network : networks) {
      for (const bool cut_items : {false, true}) {
        for (const bool cut_weights : {false, true}) {
          check_network(network, mesh, cut_items, cut_weights);
        }
      }
    }
  });
}

namespace {

/// The same module with DTensors for its parameters, which its forward has in a list of its own too.
template <class Module>
void make_dtensors(Module& module, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : module->parameters()) {
    const auto copies = distribute_tensor(parameter.detach(), mesh, {Replicate()});
    parameter.unsafeGetTensorImpl()->shallow_copy_from(copies.getIntrusivePtr());
  }
}

Tensors outputs(const at::Tensor& y) {
  return {y};
}
Tensors outputs(const std::tuple<at::Tensor, at::Tensor>& results) {
  return {std::get<0>(results), std::get<1>(results)};
}
Tensors outputs(const std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>>& results) {
  return {std::get<0>(results), std::get<0>(std::get<1>(results)), std::get<1>(std::get<1>(results))};
}

/// Results of a forward without initial state, then gradients of the input and the parameters.
template <class Module>
Tensors results_of_module(Module& module, const at::Tensor& input) {
  const auto leaf = input.detach().requires_grad_();
  auto results = outputs(module->forward(leaf));
  at::Tensor loss;
  for (const auto& result : results) {
    loss = loss.defined() ? loss + result.square().sum() : result.square().sum();
  }
  auto leaves = module->parameters();
  leaves.push_back(leaf);
  const auto gradients = torch::autograd::grad({loss}, leaves);
  results.insert(results.end(), gradients.begin(), gradients.end());
  return results;
}

/// Layers take [5, 3 items, 3], cells [3 items, 3]: on 4 ranks the last has no item.
template <class Module>
void check_module(const Module& module, std::vector<int64_t> sizes, const Placement& items) {
  const auto input = at::randn(sizes, make_generator(2));
  auto plain = module;
  const auto expected = results_of_module(plain, input);
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      for (const auto& placement : {items, Placement(Replicate()), Placement(Shard(input.dim() - 1))}) {
        auto cut = Module(std::dynamic_pointer_cast<typename Module::ContainedType>(plain->clone()));
        make_dtensors(cut, mesh);
        const auto actual = results_of_module(cut, distribute_tensor(input, mesh, {placement}));
        for (size_t i = 0; i < expected.size(); ++i) {
          expect_close(full_tensor(actual[i].detach()), expected[i].detach());
        }
        if (placement == items) {
          expect_equal(to_string(placements(actual[0])), "(" + items.to_string() + ")");
        }
      }
    });
  }
}

}  // namespace

TEST_CASE("recurrent layers and cells without an initial state", "[dtensor][ops]") {
  namespace nn = torch::nn;
  check_module(nn::LSTM(nn::LSTMOptions(3, 4).num_layers(2).bidirectional(true)), {5, 3, 3}, Shard(1));
  check_module(nn::LSTM(nn::LSTMOptions(3, 4).batch_first(true)), {3, 5, 3}, Shard(0));
  check_module(nn::GRU(nn::GRUOptions(3, 4)), {5, 3, 3}, Shard(1));
  check_module(nn::RNN(nn::RNNOptions(3, 4)), {5, 3, 3}, Shard(1));
  check_module(nn::RNN(nn::RNNOptions(3, 4).nonlinearity(torch::kReLU)), {5, 3, 3}, Shard(1));
  check_module(nn::LSTMCell(3, 4), {3, 3}, Shard(0));
  check_module(nn::GRUCell(3, 4), {3, 3}, Shard(0));
  check_module(nn::RNNCell(3, 4), {3, 3}, Shard(0));
  check_module(nn::RNNCell(nn::RNNCellOptions(3, 4).nonlinearity(torch::kReLU)), {3, 3}, Shard(0));
}

TEST_CASE("a plain initial state that is no zeros is refused on every rank", "[dtensor][ops]") {
  const auto inputs = network_inputs({.name = "LSTM"});
  run_ranks(2, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    Tensors placed;
    for (const auto& input : inputs) {
      placed.push_back(distribute_tensor(input, mesh, {Replicate()}));
    }
    const auto run_with = [&](const at::Tensor& state) {
      placed[1] = state;
      return run_network({.name = "LSTM"}, placed);
    };
    const auto zeros = at::zeros_like(inputs[1]);
    const char* const remedy = "Make it one with distribute_tensor";
    expect_throws<ValueError>([&] { run_with(rank == 0 ? zeros : inputs[1]); }, remedy);
    expect_throws<ValueError>([&] { run_with(zeros.clone().requires_grad_()); }, remedy);
    const auto copies = distribute_tensor(zeros, mesh, {Replicate()});
    expect_close(full_tensor(run_with(zeros)[0]), full_tensor(run_with(copies)[0]));
    const ImplicitReplication as_copies;
    expect_close(full_tensor(run_with(inputs[1])[0]),
                 full_tensor(run_with(distribute_tensor(inputs[1], mesh, {Replicate()}))[0]));
  });
}

}  // namespace tessera
