#pragma once
// torch::nn's recurrent layers with a hook point. Hooks run for forward and for forward_with_packed_input.

#include <torch/nn/modules/rnn.h>
#include <torch/nn/utils/rnn.h>

#include "nn/hooks/hooked.h"

namespace tessera {

/// Casts away the const of PackedSequence's accessors: hooks may change tensors of a copy that is not const.
template <>
struct TensorVisitor<torch::nn::utils::rnn::PackedSequence> {
  static constexpr bool holds_tensors = true;
  template <class F>
  static void visit(torch::nn::utils::rnn::PackedSequence& packed, F&& fn) {
    for (const at::Tensor* tensor :
         {&packed.data(), &packed.batch_sizes(), &packed.sorted_indices(), &packed.unsorted_indices()}) {
      visit_tensors(const_cast<at::Tensor&>(*tensor), fn);
    }
  }
};

}  // namespace tessera

namespace tessera::nn {

using torch::nn::GRUCellOptions;
using torch::nn::GRUOptions;
using torch::nn::LSTMCellOptions;
using torch::nn::LSTMOptions;
using torch::nn::RNNCellOptions;
using torch::nn::RNNOptions;

TESSERA_MODULE_IMPL(GRU, torch::nn::GRUImpl);
TESSERA_MODULE_IMPL(GRUCell, torch::nn::GRUCellImpl);
TESSERA_MODULE_IMPL(LSTM, torch::nn::LSTMImpl);
TESSERA_MODULE_IMPL(LSTMCell, torch::nn::LSTMCellImpl);
TESSERA_MODULE_IMPL(RNN, torch::nn::RNNImpl);
TESSERA_MODULE_IMPL(RNNCell, torch::nn::RNNCellImpl);

}  // namespace tessera::nn
