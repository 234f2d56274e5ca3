// The layers in low precision against PyTorch's Python, bit by bit.

#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/utils.h>

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "nn/modules.h"
#include "nn/rms_norm.h"
#include "testing/peer_python.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using Cases = c10::impl::GenericList;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kSeed = 9;  // of what a layer draws

/// How Python makes the layer, and calls it with the list `x` of inputs.
struct PythonCase {
  std::string layer;
  std::string call = "layer(*x)";
};

/// In the default dtype, float, of numbers.
struct LayerMode {
  at::ScalarType dtype;
  bool train;
};

struct Outcome {
  Tensors results, result_grads;
  c10::Dict<std::string, at::Tensor> grads;
  bool refused = false;  // as some layers are in some dtypes
};

/// Calls a layer with inputs. Undefined results are left out.
using LayerCall = c10::function_ref<Tensors(const Tensors&)>;

template <class Result>
Tensors defined_tensors_of(Result result) {
  Tensors tensors;
  visit_tensors(result, [&](at::Tensor& tensor) {
    if (tensor.defined()) {
      tensors.push_back(tensor);
    }
  });
  return tensors;
}

Outcome run_layer(const torch::nn::Module& layer, const Tensors& inputs, LayerCall call) {
  Outcome outcome;
  torch::manual_seed(kSeed);
  try {
    outcome.results = call(inputs);
    Tensors differentiable, grads;
    for (const auto& tensor : outcome.results) {
      outcome.result_grads.push_back(at::randn(tensor.sizes()).to(tensor.dtype()));
      if (tensor.requires_grad()) {
        differentiable.push_back(tensor);
        grads.push_back(outcome.result_grads.back());
      }
    }
    torch::autograd::backward(differentiable, grads);
  } catch (const c10::Error&) {
    Outcome none;
    none.refused = true;
    return none;
  }
  const auto keep = [&](const std::string& name, const at::Tensor& tensor) {
    if (tensor.grad().defined()) {
      outcome.grads.insert(name, tensor.grad());
    }
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    keep(std::to_string(i), inputs[i]);
  }
  for (const auto& item : layer.named_parameters()) {
    keep(item.key(), item.value());
  }
  return outcome;
}

c10::List<at::Tensor> detached(const Tensors& tensors) {
  c10::List<at::Tensor> list;
  for (const auto& tensor : tensors) {
    list.push_back(tensor.detach());
  }
  return list;
}

/// Calls `layer` forward and backward, and adds what Python needs to do the same.
void add_module_case(Cases& cases, const PythonCase& python, const LayerMode& mode, torch::nn::Module& layer,
                     Tensors inputs, LayerCall call) {
  layer.to(mode.dtype);
  layer.train(mode.train);
  c10::Dict<std::string, at::Tensor> state;
  for (const auto& item : layer.named_parameters()) {
    state.insert(item.key(), item.value().detach());
  }
  for (const auto& item : layer.named_buffers()) {
    state.insert(item.key(), item.value().clone());
  }
  for (auto& input : inputs) {
    input = input.is_floating_point() ? input.detach().to(mode.dtype, false, /*copy=*/true).requires_grad_() : input;
  }
  const auto outcome = run_layer(layer, inputs, call);
  c10::impl::GenericDict entry(c10::StringType::get(), c10::AnyType::get());
  entry.insert("layer", python.layer);
  entry.insert("call", python.call);
  entry.insert("dtype_of", at::zeros({1}, mode.dtype));
  entry.insert("train", mode.train);
  entry.insert("seed", kSeed);
  entry.insert("state", state);
  entry.insert("inputs", detached(inputs));
  entry.insert("results", detached(outcome.results));
  entry.insert("result_grads", detached(outcome.result_grads));
  entry.insert("grads", outcome.grads);
  entry.insert("refused", outcome.refused);
  cases.push_back(entry);
}

template <class Layer, class Call>
void add_case(Cases& cases, const PythonCase& python, const LayerMode& mode, Layer layer, const Tensors& inputs,
              const Call& call) {
  add_module_case(cases, python, mode, *layer, inputs, [&](const Tensors& x) { return defined_tensors_of(call(x)); });
}

template <class Layer, class... Inputs>
void add_layer_case(Cases& cases, const std::string& python, const LayerMode& mode, Layer layer,
                    const Inputs&... inputs) {
  add_case(cases, {.layer = python}, mode, layer, {inputs...}, [&](const Tensors& x) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return layer(x[I]...);
    }
    (std::index_sequence_for<Inputs...>());
  });
}

/// The name in Python, and the same layer here.
#define ADD_LAYER(Name, arguments, ...) \
  add_layer_case(cases, "nn." #Name #arguments, mode, nn::Name arguments, __VA_ARGS__)
/// A layer that takes an options struct here.
#define ADD_LAYER_AS(python, layer, ...) add_layer_case(cases, python, mode, layer, __VA_ARGS__)

void add_parameter_layers(Cases& cases, const LayerMode& mode) {
  const auto x2 = at::randn({5, 8}), x3 = at::randn({2, 5, 8}), x4 = at::randn({2, 3, 6, 8}), x1 = at::randn({8});
  const auto image = at::randn({2, 4, 6, 6}), line = at::randn({2, 4, 9}), cube = at::randn({1, 4, 5, 5, 5});
  for (const auto& x : {x1, x2, x3, x4, x3.transpose(0, 1)}) {
    ADD_LAYER(Linear, (8, 7), x);
  }
  ADD_LAYER_AS("nn.Linear(8, 7, bias=False)", nn::Linear(nn::LinearOptions(8, 7).bias(false)), x3);
  ADD_LAYER(Bilinear, (8, 8, 3), x3, x3);
  const auto words = at::randint(9, {3, 5}, at::kLong);
  ADD_LAYER(Embedding, (9, 4), words);
  ADD_LAYER(EmbeddingBag, (9, 4), words);
  ADD_LAYER_AS("nn.EmbeddingBag(9, 4, mode='sum')", nn::EmbeddingBag(nn::EmbeddingBagOptions(9, 4).mode(torch::kSum)),
               words);
  ADD_LAYER_AS("nn.LayerNorm([8])", nn::LayerNorm(nn::LayerNormOptions({8})), x3);
  ADD_LAYER_AS("nn.RMSNorm([8])", nn::RMSNorm(nn::RMSNormOptions({8}).fused(false)), x3);
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

void add_activations(Cases& cases, const LayerMode& mode) {
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
}

void add_pooling(Cases& cases, const LayerMode& mode) {
  const auto line = at::randn({2, 4, 9}), image = at::randn({2, 3, 6, 6}), cube = at::randn({1, 2, 4, 4, 4});
  ADD_LAYER(AvgPool1d, (2), line);
  ADD_LAYER(AvgPool2d, (2), image);
  ADD_LAYER(AvgPool3d, (2), cube);
  ADD_LAYER(MaxPool1d, (2), line);
  ADD_LAYER(MaxPool2d, (2), image);
  ADD_LAYER(MaxPool3d, (2), cube);
  ADD_LAYER(AdaptiveAvgPool1d, (2), line);
  ADD_LAYER(AdaptiveAvgPool2d, (2), image);
  ADD_LAYER(AdaptiveAvgPool3d, (2), cube);
  ADD_LAYER(AdaptiveMaxPool1d, (2), line);
  ADD_LAYER(AdaptiveMaxPool2d, (2), image);
  ADD_LAYER(AdaptiveMaxPool3d, (2), cube);
}

void add_dropout(Cases& cases, const LayerMode& mode) {
  const auto x = at::randn({3, 5, 8}), image = at::randn({2, 3, 4, 4}), cube = at::randn({2, 3, 4, 4, 4});
  ADD_LAYER(Dropout, (0.3), x);
  ADD_LAYER(Dropout2d, (0.3), image);
  ADD_LAYER(Dropout3d, (0.3), cube);
  ADD_LAYER(AlphaDropout, (0.3), x);
  ADD_LAYER(FeatureAlphaDropout, (0.3), image);
}

void add_sequence_layers(Cases& cases, const LayerMode& mode) {
  const auto x = at::randn({5, 2, 8}), y = at::randn({4, 2, 8}), step = at::randn({2, 8});
  ADD_LAYER(RNN, (8, 4), x);
  ADD_LAYER(GRU, (8, 4), x);
  ADD_LAYER(LSTM, (8, 4), x);
  ADD_LAYER(RNNCell, (8, 4), step);
  ADD_LAYER(GRUCell, (8, 4), step);
  ADD_LAYER(LSTMCell, (8, 4), step);
}

/// A value for each weight and bias that starts as a number: else the gradients of biases hardly say anything.
template <class Layer>
Layer with_random_values(Layer layer) {
  const torch::NoGradGuard no_grad;
  for (auto& param : layer->parameters()) {
    param.uniform_(-0.5, 0.5);
  }
  return layer;
}

at::Tensor causal_mask(int64_t length) {
  return at::ones({length, length}, at::kBool).triu(1);
}

/// Two items, of which the second's last keys are padding.
at::Tensor padding_mask(int64_t length) {
  auto mask = at::zeros({2, length}, at::kBool);
  mask[1].slice(0, length - 2).fill_(true);
  return mask;
}

void add_attention(Cases& cases, const LayerMode& mode) {
  using Options = torch::nn::MultiheadAttentionOptions;
  const auto x = at::randn({5, 2, 8}), y = at::randn({4, 2, 8}), z = at::randn({4, 2, 8}), line = at::randn({5, 8});
  const auto wide = at::randn({4, 2, 6}), wider = at::randn({4, 2, 7});
  const auto no_mask = at::Tensor();
  const auto add = [&](const PythonCase& python, const Options& options, const Tensors& inputs, const auto& call) {
    const auto layer = with_random_values(nn::MultiheadAttention(options));
    add_case(cases, python, mode, layer, inputs, [&](const Tensors& in) { return call(*layer.ptr(), in); });
  };
  using Layer = nn::MultiheadAttention::Impl;
  const std::string plain = "nn.MultiheadAttention(8, 2)", drops = "nn.MultiheadAttention(8, 2, dropout=0.3)";
  for (const bool weights : {true, false}) {
    const std::string end = weights ? ")" : ", need_weights=False)";
    const auto self = [&](Layer& layer, const Tensors& in) {
      return layer.call(in[0], in[0], in[0], no_mask, weights);
    };
    add({plain, "layer(x[0], x[0], x[0]" + end}, Options(8, 2), {x}, self);
    add({plain, "layer(x[0], x[0], x[0]" + end}, Options(8, 2), {line}, self);
    add({drops, "layer(x[0], x[0], x[0]" + end}, Options(8, 2).dropout(0.3), {x}, self);
    add({"nn.MultiheadAttention(8, 2, bias=False)", "layer(x[0], x[0], x[0]" + end}, Options(8, 2).bias(false), {x},
        self);
    add({plain, "layer(x[0], x[1], x[1]" + end}, Options(8, 2), {x, y},
        [&](Layer& layer, const Tensors& in) { return layer.call(in[0], in[1], in[1], no_mask, weights); });
    const auto all = [&](Layer& layer, const Tensors& in) { return layer.call(in[0], in[1], in[2], no_mask, weights); };
    add({plain, "layer(*x" + end}, Options(8, 2), {x, y, z}, all);
    add({"nn.MultiheadAttention(8, 2, kdim=6, vdim=7)", "layer(*x" + end}, Options(8, 2).kdim(6).vdim(7),
        {x, wide, wider}, all);
    const auto masked = [&](Layer& layer, const Tensors& in) {
      return layer.call(in[0], in[0], in[0], in[1], weights, in[2]);
    };
    const std::string with_masks = "layer(x[0], x[0], x[0], key_padding_mask=x[1], attn_mask=x[2]" + end;
    add({plain, with_masks}, Options(8, 2), {x, padding_mask(5), causal_mask(5)}, masked);
    add({plain, with_masks}, Options(8, 2), {x, padding_mask(5), causal_mask(5).expand({4, 5, 5})}, masked);
    add({plain, with_masks}, Options(8, 2), {x, at::randn({2, 5}), at::randn({5, 5})}, masked);
    add({"nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True)", with_masks},
        Options(8, 2).add_bias_kv(true).add_zero_attn(true), {x, padding_mask(5), causal_mask(5)}, masked);
    const auto with_mask = [&](Layer& layer, const Tensors& in) {
      return layer.call(in[0], in[0], in[0], no_mask, weights, in[1]);
    };
    add({plain, "layer(x[0], x[0], x[0], attn_mask=x[1]" + end}, Options(8, 2), {x, causal_mask(5)}, with_mask);
  }
  add({plain, "layer(x[0], x[0], x[0], average_attn_weights=False)"}, Options(8, 2), {x},
      [&](Layer& layer, const Tensors& in) { return layer.call(in[0], in[0], in[0], no_mask, true, no_mask, false); });
}

void add_transformers(Cases& cases, const LayerMode& mode) {
  using torch::nn::TransformerDecoderLayerOptions, torch::nn::TransformerEncoderLayerOptions;
  const auto x = at::randn({5, 2, 8}), y = at::randn({4, 2, 8});
  const auto add = [&](const PythonCase& python, auto made, const Tensors& inputs, const auto& call) {
    const auto layer = with_random_values(made);
    add_case(cases, python, mode, layer, inputs, [&](const Tensors& in) { return call(*layer.ptr(), in); });
  };
  const auto one = [](auto& layer, const Tensors& in) { return layer.call(in[0]); };
  const auto two = [](auto& layer, const Tensors& in) { return layer.call(in[0], in[1]); };
  const auto masked = [](auto& layer, const Tensors& in) { return layer.call(in[0], in[1], in[2]); };
  const std::string sizes = "(8, 2, 16, dropout=0.3";
  const auto encoder = TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.3);
  const auto decoder = TransformerDecoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.3);
  const std::string python_encoder = "nn.TransformerEncoderLayer" + sizes + ")";
  const std::string python_decoder = "nn.TransformerDecoderLayer" + sizes + ")";
  add({python_encoder}, nn::TransformerEncoderLayer(encoder), {x}, one);
  add({python_encoder}, nn::TransformerEncoderLayer(encoder), {x, causal_mask(5), padding_mask(5)}, masked);
  add({"nn.TransformerEncoderLayer" + sizes + ", activation='gelu')"},
      nn::TransformerEncoderLayer(TransformerEncoderLayerOptions(encoder).activation(torch::kGELU)), {x}, one);
  add({python_decoder}, nn::TransformerDecoderLayer(decoder), {x, y}, two);
  add({python_decoder}, nn::TransformerDecoderLayer(decoder),
      {x, y, causal_mask(5), at::randn({5, 4}), padding_mask(5), padding_mask(4)},
      [](auto& layer, const Tensors& in) { return layer.call(in[0], in[1], in[2], in[3], in[4], in[5]); });

  const auto norm = [] { return torch::nn::AnyModule(nn::LayerNorm(torch::nn::LayerNormOptions({8}))); };
  nn::TransformerEncoder encoders(
      nn::TransformerEncoderOptions(torch::nn::TransformerEncoderLayer(encoder), 2).norm(norm()));
  nn::TransformerDecoder decoders(nn::TransformerDecoderOptions(torch::nn::TransformerDecoderLayer(decoder), 2));
  nn::Transformer both(nn::TransformerOptions(8, 2, 1, 1).dim_feedforward(16).dropout(0.3));
  const auto stack = [](auto& layer, const Tensors& in) { return layer.call(in[0], in[1]); };
  add({"nn.TransformerEncoder(" + python_encoder + ", 2, nn.LayerNorm([8]))"}, encoders, {x, causal_mask(5)}, stack);
  add({"nn.TransformerDecoder(" + python_decoder + ", 2)", "layer(x[0], x[1], tgt_mask=x[2])"}, decoders,
      {x, y, causal_mask(5)}, [](auto& layer, const Tensors& in) { return layer.call(in[0], in[1], in[2]); });
  add({"nn.Transformer(8, 2, 1, 1, 16, dropout=0.3)"}, both, {y, x}, stack);
}

Cases all_layer_cases() {
  torch::manual_seed(5);
  Cases cases(c10::AnyType::get());
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (const bool train : {true, false}) {
      const LayerMode mode{.dtype = dtype, .train = train};
      add_parameter_layers(cases, mode);
      add_activations(cases, mode);
      add_pooling(cases, mode);
      add_dropout(cases, mode);
      add_sequence_layers(cases, mode);
      add_attention(cases, mode);
      add_transformers(cases, mode);
    }
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
