// LSTM layers. ATen's lstm() on float tensors of the CPU calls a kernel of oneDNN for each layer and direction, which
// saves its state for backward in a format of its own. On DTensors a layer is its steps, as in ATen's lstm() of other
// dtypes: a cut batch stays cut.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/lstm_cell.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

namespace tessera {

namespace {

/// input [length, batch, features] → [length, batch, hidden], the last hidden and cell state, and nothing saved.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> lstm_layer(
    const at::Tensor& input, const at::Tensor& input_weight, const at::Tensor& hidden_weight,
    const at::Tensor& input_bias, const at::Tensor& hidden_bias, const at::Tensor& hidden, const at::Tensor& cell,
    bool reverse, at::IntArrayRef /*batch_sizes*/, int64_t /*mode*/, int64_t /*hidden_size*/, int64_t /*num_layers*/,
    bool has_biases, bool /*bidirectional*/, bool /*batch_first*/, bool /*train*/) {
  const auto bias = [&](const at::Tensor& given) { return has_biases ? std::optional(given) : std::nullopt; };
  auto h = hidden, c = cell;
  const int64_t length = input.size(0);
  std::vector<at::Tensor> outputs(static_cast<size_t>(length));
  for (int64_t step = 0; step < length; ++step) {
    const int64_t t = reverse ? length - 1 - step : step;
    std::tie(h, c) =
        at::lstm_cell(input.select(0, t), {h, c}, input_weight, hidden_weight, bias(input_bias), bias(hidden_bias));
    outputs[static_cast<size_t>(t)] = h;
  }
  return {at::stack(outputs), h, c, at::empty({0}, at::kByte)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("mkldnn_rnn_layer", &lstm_layer);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("mkldnn_rnn_layer", &lstm_layer);
}

}  // namespace tessera
