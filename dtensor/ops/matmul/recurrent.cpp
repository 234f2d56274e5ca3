// Recurrent networks. For float tensors on the CPU, ATen's lstm() calls a oneDNN kernel for each layer and direction,
// which saves its state for backward in its own format. For DTensors, a layer consists of its steps, as in ATen's
// lstm() of other dtypes, so a sharded batch stays sharded.
//
// Without an initial state, layers of torch::nn make one of plain zeros. Here these become DTensors, sharded like the
// batch.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gru_cell_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/gru_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/lstm_cell.h>
#include <ATen/ops/lstm_cell_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/lstm_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/rnn_relu_cell_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/rnn_relu_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/rnn_tanh_cell_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/rnn_tanh_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/from_local_checks.h"

namespace tessera {

namespace {

/// Maps input [length, batch, features] to [length, batch, hidden], the last hidden and cell state, and nothing saved.
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

bool is_plain_state(const at::Tensor& tensor) {
  return tensor.defined() && !dtensor_meta(tensor);
}

/// Returns zeros of the size of `state`. Dim `state_dim` is sharded like dim `batch_dim` of the input.
at::Tensor zero_state(const at::Tensor& state, const DTensorSpec& input, int64_t state_dim, int64_t batch_dim) {
  Placements placements(input.placements().size(), Replicate());
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (const auto& cut = input.placements()[axis]; cut.is_shard(batch_dim) && state_dim < state.dim()) {
      placements[axis] = Shard(state_dim, cut.order());
    }
  }
  const auto spec = DTensorSpec::make(input.mesh(), std::move(placements), TensorMeta::of(state));
  return wrap_local(at::zeros(spec->local_sizes(), state.options()), spec);
}

struct BatchDims {
  int64_t input;
  int64_t state;
};

/// Returns the batch dims of [length, batch, features], or [batch, length, features], and of [layers, batch, hidden];
/// none for a sequence without batch.
BatchDims batch_dims(const at::Tensor& input, bool batch_first) {
  return {.input = input.dim() < 3 ? input.dim() : batch_first ? 0 : 1, .state = 1};
}

constexpr BatchDims kCellDims{.input = 0, .state = 0};

/// Replaces plain zero states by DTensors if the input is a DTensor. Ranks communicate, because a state may be zeros on
/// only some of them.
std::vector<at::Tensor> initial_states(const char* op, at::TensorList states, const at::Tensor& input, BatchDims dims) {
  auto result = states.vec();
  const auto* meta = dtensor_meta(input);
  if (!meta || ImplicitReplication::active() || std::ranges::none_of(states, is_plain_state)) {
    return result;
  }
  const bool are_zeros = std::ranges::all_of(states, [](const at::Tensor& state) {
    return !is_plain_state(state) || (!state.requires_grad() && !state.any().item<bool>());
  });
  TESSERA_CHECK(ValueError, same_on_all_ranks({are_zeros}, meta->spec->mesh()) && are_zeros,
                "{}: an initial state is a plain tensor, and not zeros without a gradient, beside an input that is a "
                "DTensor. Make it one with distribute_tensor(state, mesh, {{Replicate()}}), or leave it out",
                op);
  for (auto& state : result) {
    if (is_plain_state(state)) {
      state = zero_state(state, *meta->spec, dims.state, dims.input);
    }
  }
  return result;
}

using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;

ThreeTensors lstm(const at::Tensor& input, at::TensorList states, at::TensorList params, bool has_biases,
                  int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  return at::compositeimplicitautograd::lstm(
      input, initial_states("aten::lstm", states, input, batch_dims(input, batch_first)), params, has_biases,
      num_layers, dropout, train, bidirectional, batch_first);
}

using Recurrence = TwoTensors(const at::Tensor&, const at::Tensor&, at::TensorList, bool, int64_t, double, bool, bool,
                              bool);

/// Runs gru and rnn_*; `layers` is ATen's implementation.
template <Recurrence& layers>
TwoTensors recurrence(const at::Tensor& input, const at::Tensor& state, at::TensorList params, bool has_biases,
                      int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  const auto states = initial_states("recurrent layers", state, input, batch_dims(input, batch_first));
  return layers(input, states[0], params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
}

TwoTensors lstm_step(const at::Tensor& input, at::TensorList states, const at::Tensor& input_weight,
                     const at::Tensor& hidden_weight, const OptionalTensor& input_bias,
                     const OptionalTensor& hidden_bias) {
  return at::compositeimplicitautograd::lstm_cell(input, initial_states("aten::lstm_cell", states, input, kCellDims),
                                                  input_weight, hidden_weight, input_bias, hidden_bias);
}

using Cell = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                        const OptionalTensor&, const OptionalTensor&);

template <Cell& cell>
at::Tensor step(const at::Tensor& input, const at::Tensor& state, const at::Tensor& input_weight,
                const at::Tensor& hidden_weight, const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto states = initial_states("recurrent cells", state, input, kCellDims);
  return cell(input, states[0], input_weight, hidden_weight, input_bias, hidden_bias);
}

void override_recurrent(torch::Library& library) {
  namespace composite = at::compositeimplicitautograd;
  library.impl("mkldnn_rnn_layer", &lstm_layer);
  library.impl("lstm.input", &lstm);
  library.impl("gru.input", &recurrence<composite::gru>);
  library.impl("rnn_tanh.input", &recurrence<composite::rnn_tanh>);
  library.impl("rnn_relu.input", &recurrence<composite::rnn_relu>);
  library.impl("lstm_cell", &lstm_step);
  library.impl("gru_cell", &step<composite::gru_cell>);
  library.impl("rnn_tanh_cell", &step<composite::rnn_tanh_cell>);
  library.impl("rnn_relu_cell", &step<composite::rnn_relu_cell>);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  override_recurrent(library);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  override_recurrent(library);
}

}  // namespace tessera
