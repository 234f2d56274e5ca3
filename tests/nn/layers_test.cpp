// Every drop-in computes what the stock layer computes, with hooks and without; attention but for rounding.

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <c10/util/FunctionRef.h>
#include <torch/nn/modules/container/any.h>
#include <torch/utils.h>

#include <catch2/catch.hpp>

#include "nn/modules.h"

namespace {

using tessera::HookPoint;
using tessera::TensorRefs;

constexpr uint64_t kSeed = 11;

template <class T>
std::vector<at::Tensor> tensors_of(T value) {
  std::vector<at::Tensor> tensors;
  tessera::visit_tensors(value, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

using Compare = bool (*)(const at::Tensor& actual, const at::Tensor& expected);

bool is_equal(const at::Tensor& actual, const at::Tensor& expected) {
  return at::equal(actual, expected);
}

/// Of layers that have Python's forward, which rounds otherwise than libtorch's (nn/hooks/python_forward.h).
bool is_close(const at::Tensor& actual, const at::Tensor& expected) {
  return at::allclose(actual, expected, 1e-5, 1e-6);
}

/// A layer, and its call of the same inputs each time. Not a template, of which each pair of layers would have its own.
struct Layer {
  torch::nn::Module& module;
  c10::function_ref<std::vector<at::Tensor>()> call;
};

// `stock` was built with the seed; a drop-in from the same options is the same layer, as is hooked(stock).
void check_same_layers(Compare compare, const Layer& stock, const Layer& ours, HookPoint& hooks, size_t num_inputs) {
  INFO("layer " << stock.module.name() << ", seed " << kSeed);
  const auto parameters = stock.module.parameters(), our_parameters = ours.module.parameters();
  REQUIRE(parameters.size() == our_parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) our_parameters[i].data().copy_(parameters[i]);
  torch::manual_seed(kSeed);
  const auto expected = stock.call();
  REQUIRE_FALSE(expected.empty());
  size_t inputs_seen = 0, outputs_seen = 0;
  for (const bool with_hooks : {false, true}) {
    if (with_hooks) {
      hooks.register_forward_pre_hook([&](HookPoint&, TensorRefs inputs) { inputs_seen = inputs.size(); });
      hooks.register_forward_hook([&](HookPoint&, TensorRefs outputs) { outputs_seen = outputs.size(); });
    }
    torch::manual_seed(kSeed);
    const auto actual = ours.call();
    REQUIRE(actual.size() == expected.size());
    for (size_t i = 0; i < expected.size(); ++i) CHECK(compare(actual[i], expected[i]));
  }
  CHECK(inputs_seen == num_inputs);
  CHECK(outputs_seen == expected.size());
}

template <class Stock, class Ours, class... Args>
void check_same(Compare compare, Stock stock, Ours ours, Args... args) {
  check_same_layers(compare, {*stock, [&] { return tensors_of(stock(args...)); }},
                    {*ours, [&] { return tensors_of(ours(args...)); }}, *ours, (tensors_of(args).size() + ... + 0));
}

// `from_stock` makes a drop-in of `stock`.
#define CHECK_SAME_MADE(compare, from_stock, Name, construct, ...)          \
  do {                                                                      \
    auto stock = torch::nn::Name construct;                                 \
    auto ours = tessera::nn::Name construct;                                \
    stock->eval();                                                          \
    ours->eval();                                                           \
    check_same(compare, stock, ours, __VA_ARGS__);                          \
    check_same(compare, stock, tessera::nn::Name(from_stock), __VA_ARGS__); \
  } while (false)

#define CHECK_SAME(Name, construct, ...) CHECK_SAME_MADE(is_equal, tessera::hooked(stock), Name, construct, __VA_ARGS__)
#define CHECK_CLOSE(Name, construct, ...) \
  CHECK_SAME_MADE(is_close, tessera::hooked(stock), Name, construct, __VA_ARGS__)
// Of modules whose layers have hook points, too, which hooked() cannot give them.
#define CHECK_CLOSE_STACK(Name, construct, ...) CHECK_SAME_MADE(is_close, *stock, Name, construct, __VA_ARGS__)

TEST_CASE("linear, embedding and normalization layers", "[nn]") {
  torch::manual_seed(kSeed);
  const at::Tensor x = at::randn({2, 4}), indices = at::arange(4);
  CHECK_SAME(Linear, (4, 3), x);
  CHECK_SAME(Bilinear, (4, 4, 2), x, x);
  CHECK_SAME(Identity, (), x);
  CHECK_SAME(Flatten, (), at::randn({2, 3, 4}));
  CHECK_SAME(Embedding, (5, 3), indices);
  CHECK_SAME(EmbeddingBag, (5, 3), indices, at::arange(0, 4, 2));
  CHECK_SAME(EmbeddingBag, (5, 3), indices.view({2, 2}));
  CHECK_SAME(LayerNorm, (torch::nn::LayerNormOptions({4})), x);
  CHECK_SAME(GroupNorm, (2, 4), x);
  CHECK_SAME(LocalResponseNorm, (2), at::randn({2, 4, 3}));
  CHECK_SAME(BatchNorm1d, (4), x);
  CHECK_SAME(BatchNorm2d, (3), at::randn({2, 3, 4, 4}));
  CHECK_SAME(BatchNorm3d, (3), at::randn({2, 3, 4, 4, 4}));
  CHECK_SAME(InstanceNorm1d, (3), at::randn({2, 3, 4}));
  CHECK_SAME(InstanceNorm2d, (3), at::randn({2, 3, 4, 4}));
  CHECK_SAME(InstanceNorm3d, (3), at::randn({2, 3, 4, 4, 4}));
}

TEST_CASE("activations and dropout", "[nn]") {
  torch::manual_seed(kSeed);
  const at::Tensor x = at::randn({2, 4});
  CHECK_SAME(ELU, (), x);
  CHECK_SAME(SELU, (), x);
  CHECK_SAME(Hardshrink, (), x);
  CHECK_SAME(Hardtanh, (), x);
  CHECK_SAME(LeakyReLU, (), x);
  CHECK_SAME(LogSigmoid, (), x);
  CHECK_SAME(Softmax, (1), x);
  CHECK_SAME(Softmin, (1), x);
  CHECK_SAME(LogSoftmax, (1), x);
  CHECK_SAME(Softmax2d, (), at::randn({2, 3, 4, 4}));
  CHECK_SAME(PReLU, (), x);
  CHECK_SAME(ReLU, (), x);
  CHECK_SAME(ReLU6, (), x);
  CHECK_SAME(RReLU, (), x);
  CHECK_SAME(CELU, (), x);
  CHECK_SAME(GLU, (), x);
  CHECK_SAME(GELU, (), x);
  CHECK_SAME(SiLU, (), x);
  CHECK_SAME(Mish, (), x);
  CHECK_SAME(Sigmoid, (), x);
  CHECK_SAME(Softplus, (), x);
  CHECK_SAME(Softshrink, (), x);
  CHECK_SAME(Softsign, (), x);
  CHECK_SAME(Tanh, (), x);
  CHECK_SAME(Tanhshrink, (), x);
  CHECK_SAME(Threshold, (0.1, 20), x);
  const at::Tensor image = at::randn({2, 3, 4, 4});
  check_same(is_equal, torch::nn::Dropout(0.5), tessera::nn::Dropout(0.5), x);
  check_same(is_equal, torch::nn::Dropout2d(0.5), tessera::nn::Dropout2d(0.5), image);
  check_same(is_equal, torch::nn::Dropout3d(0.5), tessera::nn::Dropout3d(0.5), at::randn({1, 3, 2, 2, 2}));
  check_same(is_equal, torch::nn::AlphaDropout(0.5), tessera::nn::AlphaDropout(0.5), x);
  check_same(is_equal, torch::nn::FeatureAlphaDropout(0.5), tessera::nn::FeatureAlphaDropout(0.5), image);
}

TEST_CASE("convolutions and pooling", "[nn]") {
  torch::manual_seed(kSeed);
  const at::Tensor x1 = at::randn({2, 3, 8}), x2 = at::randn({2, 3, 8, 8}), x3 = at::randn({1, 3, 4, 4, 4});
  CHECK_SAME(Conv1d, (3, 2, 3), x1);
  CHECK_SAME(Conv2d, (3, 2, 3), x2);
  CHECK_SAME(Conv3d, (3, 2, 3), x3);
  CHECK_SAME(ConvTranspose1d, (3, 2, 3), x1);
  CHECK_SAME(ConvTranspose2d, (3, 2, 3), x2);
  CHECK_SAME(ConvTranspose3d, (3, 2, 3), x3);
  CHECK_SAME(AvgPool1d, (2), x1);
  CHECK_SAME(AvgPool2d, (2), x2);
  CHECK_SAME(AvgPool3d, (2), x3);
  CHECK_SAME(MaxPool1d, (2), x1);
  CHECK_SAME(MaxPool2d, (2), x2);
  CHECK_SAME(MaxPool3d, (2), x3);
  CHECK_SAME(AdaptiveAvgPool1d, (2), x1);
  CHECK_SAME(AdaptiveAvgPool2d, (2), x2);
  CHECK_SAME(AdaptiveAvgPool3d, (2), x3);
  CHECK_SAME(AdaptiveMaxPool1d, (2), x1);
  CHECK_SAME(AdaptiveMaxPool2d, (2), x2);
  CHECK_SAME(AdaptiveMaxPool3d, (2), x3);
}

TEST_CASE("recurrent layers, with and without a hidden state, also packed", "[nn]") {
  torch::manual_seed(kSeed);
  const at::Tensor x = at::randn({5, 2, 3}), h = at::randn({1, 2, 4}), step = at::randn({2, 3});
  CHECK_SAME(RNN, (3, 4), x, h);
  CHECK_SAME(GRU, (3, 4), x);
  CHECK_SAME(LSTM, (3, 4), x);
  CHECK_SAME(LSTM, (3, 4), x, std::make_tuple(h, h));
  CHECK_SAME(RNNCell, (3, 4), step);
  CHECK_SAME(GRUCell, (3, 4), step, h[0]);
  CHECK_SAME(LSTMCell, (3, 4), step);

  namespace rnn = torch::nn::utils::rnn;
  tessera::nn::LSTM lstm(3, 4);
  const auto packed = rnn::pack_padded_sequence(x, at::arange(5, 3, -1).to(at::kLong));
  const at::Tensor expected = std::get<0>(lstm->forward_with_packed_input(packed)).data();
  lstm->register_forward_pre_hook([&](HookPoint&, TensorRefs inputs) {
    REQUIRE(inputs.size() == 2);  // data and batch sizes: sorted input has no indices
    *inputs[0] = *inputs[0] * 2;
  });
  const at::Tensor doubled = std::get<0>(lstm->forward_with_packed_input(packed)).data();
  CHECK_FALSE(at::equal(doubled, expected));
  const auto packed_double = rnn::pack_padded_sequence(x * 2, at::arange(5, 3, -1).to(at::kLong));
  const std::shared_ptr<torch::nn::LSTMImpl> stock = lstm.ptr();
  CHECK(at::equal(doubled, std::get<0>(stock->forward_with_packed_input(packed_double)).data()));
  CHECK(at::equal(packed.data(), rnn::pack_padded_sequence(x, at::arange(5, 3, -1).to(at::kLong)).data()));
}

TEST_CASE("attention and transformers with default arguments", "[nn]") {
  torch::manual_seed(kSeed);
  const at::Tensor x = at::randn({3, 2, 4});
  CHECK_CLOSE(MultiheadAttention, (4, 2), x, x, x);
  CHECK_CLOSE(MultiheadAttention, (4, 2), x, x, x, at::Tensor(), false);
  CHECK_CLOSE(TransformerEncoderLayer, (4, 2), x);
  CHECK_CLOSE(TransformerDecoderLayer, (4, 2), x, x);
  const auto encoder = torch::nn::TransformerEncoderOptions(torch::nn::TransformerEncoderLayer(4, 2), 2);
  const auto decoder = torch::nn::TransformerDecoderOptions(torch::nn::TransformerDecoderLayer(4, 2), 2);
  CHECK_CLOSE_STACK(TransformerEncoder, (encoder), x);
  CHECK_CLOSE_STACK(TransformerDecoder, (decoder), x, x);
  CHECK_CLOSE_STACK(Transformer, (torch::nn::TransformerOptions(4, 2, 1, 1).dim_feedforward(8)), x, x);

  torch::nn::AnyModule any(tessera::nn::TransformerEncoderLayer(4, 2));
  CHECK(any.forward(x).sizes() == x.sizes());
}

}  // namespace
