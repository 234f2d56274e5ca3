// Recurrent layers of floats, for which ATen's lstm() calls a kernel of oneDNN on plain tensors of the CPU.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/gru.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

using namespace tessera;

namespace {

using Tensors = std::vector<at::Tensor>;

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
Tensors inputs_of(const Network& network) {
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

Tensors run(const Network& network, const Tensors& x) {
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
  auto results = run(network, leaves);
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
  const auto inputs = inputs_of(network);
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
  expect_close(run(network, placed)[0], expected[0].detach());
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
