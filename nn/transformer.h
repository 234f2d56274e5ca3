#pragma once
// torch::nn's attention and transformer layers with a hook point. Same constructors, members and results. The layers
// inside of a transformer are stock ones: the outer layer is the unit that hooks see.

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include "nn/hooked.h"

namespace tessera::nn {

using torch::nn::MultiheadAttentionOptions;
using torch::nn::TransformerDecoderLayerOptions;
using torch::nn::TransformerDecoderOptions;
using torch::nn::TransformerEncoderLayerOptions;
using torch::nn::TransformerEncoderOptions;
using torch::nn::TransformerOptions;

TESSERA_MODULE_IMPL(MultiheadAttention, torch::nn::MultiheadAttentionImpl);
TESSERA_MODULE_IMPL(Transformer, torch::nn::TransformerImpl);
TESSERA_MODULE_IMPL(TransformerDecoder, torch::nn::TransformerDecoderImpl);
TESSERA_MODULE_IMPL(TransformerDecoderLayer, torch::nn::TransformerDecoderLayerImpl);
TESSERA_MODULE_IMPL(TransformerEncoder, torch::nn::TransformerEncoderImpl);
TESSERA_MODULE_IMPL(TransformerEncoderLayer, torch::nn::TransformerEncoderLayerImpl);

}  // namespace tessera::nn
