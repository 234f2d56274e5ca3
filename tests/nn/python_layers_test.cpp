// The layers in low precision against PyTorch's Python, bit by bit.

#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/utils.h>

#include <fstream>
#include <string>
#include <vector>

#include "nn/modules.h"
#include "nn/rms_norm.h"
#include "testing/peer_python.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using Cases = c10::impl::GenericList;

/// Calls `layer` in `dtype`, and adds what Python needs to do the same.
template <class Layer, class... Inputs>
void add_layer_case(Cases& cases, const std::string& python, at::ScalarType dtype, Layer layer,
                    const Inputs&... inputs) {
  const c10::NoGradGuard no_grad;
  layer->to(dtype);
  layer->eval();
  const auto cast = [&](const at::Tensor& input) { return input.is_floating_point() ? input.to(dtype) : input; };
  c10::List<at::Tensor> results;
  bool refused = false;  // as some layers are in some dtypes
  try {
    auto result = layer(cast(inputs)...);
    visit_tensors(result, [&](at::Tensor& tensor) { results.push_back(tensor); });
  } catch (const c10::Error&) {
    refused = true;
  }
  c10::Dict<std::string, at::Tensor> state;
  for (const auto& item : layer->named_parameters()) {
    state.insert(item.key(), item.value().detach());
  }
  for (const auto& item : layer->named_buffers()) {
    state.insert(item.key(), item.value());
  }
  c10::impl::GenericDict entry(c10::StringType::get(), c10::AnyType::get());
  entry.insert("layer", python);
  entry.insert("dtype_of", at::zeros({1}, dtype));
  entry.insert("state", state);
  entry.insert("inputs", c10::List<at::Tensor>({cast(inputs)...}));
  entry.insert("results", results);
  entry.insert("refused", refused);
  cases.push_back(entry);
}

/// The name in Python, and the same layer here.
#define ADD_LAYER(Name, arguments, ...) \
  add_layer_case(cases, "nn." #Name #arguments, dtype, nn::Name arguments, __VA_ARGS__)
/// A layer that takes an options struct here.
#define ADD_LAYER_AS(python, layer, ...) add_layer_case(cases, python, dtype, layer, __VA_ARGS__)

void add_parameter_layers(Cases& cases, at::ScalarType dtype) {
  const auto x2 = at::randn({5, 8}), x3 = at::randn({2, 5, 8}), x4 = at::randn({2, 3, 6, 8}), x1 = at::randn({8});
  const auto image = at::randn({2, 4, 6, 6}), line = at::randn({2, 4, 9}), cube = at::randn({1, 4, 5, 5, 5});
  for (const auto& x : {x1, x2, x3, x4, x3.transpose(0, 1)}) {
    ADD_LAYER(Linear, (8, 7), x);
  }
  ADD_LAYER_AS("nn.Linear(8, 7, bias=False)", nn::Linear(nn::LinearOptions(8, 7).bias(false)), x3);
  ADD_LAYER(Bilinear, (8, 8, 3), x3, x3);
  ADD_LAYER(Embedding, (9, 4), at::randint(9, {3, 5}, at::kLong));
  ADD_LAYER_AS("nn.LayerNorm([8])", nn::LayerNorm(nn::LayerNormOptions({8})), x3);
  ADD_LAYER_AS("nn.RMSNorm([8])", nn::RMSNorm(nn::RMSNormOptions({8})), x3);
  ADD_LAYER(GroupNorm, (2, 4), image);
  ADD_LAYER(LocalResponseNorm, (2), image);
  ADD_LAYER(BatchNorm1d, (4), line);
  ADD_LAYER(BatchNorm2d, (4), image);
  ADD_LAYER(BatchNorm3d, (4), cube);
  ADD_LAYER(InstanceNorm1d, (4), line);
  ADD_LAYER(InstanceNorm2d, (4), image);
  ADD_LAYER(InstanceNorm3d, (4), cube);
  ADD_LAYER(Conv1d, (4, 3, 3), line);
  ADD_LAYER(Conv2d, (4, 3, 3), image);
  ADD_LAYER(Conv3d, (4, 3, 3), cube);
  ADD_LAYER(ConvTranspose1d, (4, 3, 3), line);
  ADD_LAYER(ConvTranspose2d, (4, 3, 3), image);
  ADD_LAYER(ConvTranspose3d, (4, 3, 3), cube);
}

void add_activations(Cases& cases, at::ScalarType dtype) {
  const auto x = at::randn({3, 5, 8}), image = at::randn({2, 3, 4, 4});
  ADD_LAYER(ELU, (), x);
  ADD_LAYER(SELU, (), x);
  ADD_LAYER(CELU, (), x);
  ADD_LAYER(GELU, (), x);
  ADD_LAYER(SiLU, (), x);
  ADD_LAYER(Mish, (), x);
  ADD_LAYER(GLU, (), x);
  ADD_LAYER(Hardshrink, (), x);
  ADD_LAYER(Hardtanh, (), x);
  ADD_LAYER(LeakyReLU, (), x);
  ADD_LAYER(LogSigmoid, (), x);
  ADD_LAYER(Softmax, (1), x);
  ADD_LAYER(Softmin, (1), x);
  ADD_LAYER(LogSoftmax, (1), x);
  ADD_LAYER(Softmax2d, (), image);
  ADD_LAYER(PReLU, (), x);
  ADD_LAYER(ReLU6, (), x);
  ADD_LAYER(RReLU, (), x);
  ADD_LAYER(Sigmoid, (), x);
  ADD_LAYER(Softplus, (), x);
  ADD_LAYER(Softshrink, (), x);
  ADD_LAYER(Softsign, (), x);
  ADD_LAYER(Tanh, (), x);
  ADD_LAYER(Tanhshrink, (), x);
  ADD_LAYER(Threshold, (0.1, 20), x);
  ADD_LAYER(AvgPool2d, (2), image);
  ADD_LAYER(MaxPool2d, (2), image);
  ADD_LAYER(AdaptiveAvgPool2d, (2), image);
  ADD_LAYER(AdaptiveMaxPool2d, (2), image);
}

void add_sequence_layers(Cases& cases, at::ScalarType dtype) {
  const auto x = at::randn({5, 2, 8}), y = at::randn({4, 2, 8}), step = at::randn({2, 8});
  ADD_LAYER(RNN, (8, 4), x);
  ADD_LAYER(GRU, (8, 4), x);
  ADD_LAYER(LSTM, (8, 4), x);
  ADD_LAYER(RNNCell, (8, 4), step);
  ADD_LAYER(GRUCell, (8, 4), step);
  ADD_LAYER(LSTMCell, (8, 4), step);
}

Cases all_layer_cases() {
  torch::manual_seed(5);
  Cases cases(c10::AnyType::get());
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    add_parameter_layers(cases, dtype);
    add_activations(cases, dtype);
    add_sequence_layers(cases, dtype);
  }
  return cases;
}

}  // namespace

TEST_CASE("a linear layer is one op in every dtype and for every number of dims", "[nn]") {
  torch::manual_seed(3);
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{64}, {9, 64}, {2, 9, 64}, {2, 3, 9, 64}}) {
      INFO(toString(dtype) << ", " << sizes.size() << " dims");
      torch::nn::Linear stock(64, 33);
      stock->to(dtype);
      const auto x = at::randn(sizes).to(dtype);
      const auto expected = at::linear(x, stock->weight, stock->bias);
      nn::Linear linear(tessera::hooked(stock));
      CHECK(at::equal(linear(x), expected));
      CHECK(at::equal(linear->forward(x), expected));
      linear->register_forward_pre_hook([](HookPoint&, TensorRefs) {});
      CHECK(at::equal(linear(x), expected));
      CHECK(at::equal(linear->forward(x), expected));
    }
  }
}

TEST_CASE("layers compute what Python's compute, bit by bit", "[nn]") {
  const TempFolder folder;
  const auto path = folder.path("layers");
  const auto bytes = torch::jit::pickle_save(all_layer_cases());
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
  run_peer_python("torch", "tests/nn/python_layers_peer.py", path);
}

}  // namespace tessera::testing
