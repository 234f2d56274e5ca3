#pragma once
// torch::nn's convolutions with a hook point, and with the same constructors, members and results.

#include <torch/nn/modules/conv.h>

#include "nn/hooks/hooked.h"

namespace tessera::nn {

using torch::nn::Conv1dOptions;
using torch::nn::Conv2dOptions;
using torch::nn::Conv3dOptions;
using torch::nn::ConvTranspose1dOptions;
using torch::nn::ConvTranspose2dOptions;
using torch::nn::ConvTranspose3dOptions;

TESSERA_MODULE_IMPL(Conv1d, torch::nn::Conv1dImpl);
TESSERA_MODULE_IMPL(Conv2d, torch::nn::Conv2dImpl);
TESSERA_MODULE_IMPL(Conv3d, torch::nn::Conv3dImpl);
TESSERA_MODULE_IMPL(ConvTranspose1d, torch::nn::ConvTranspose1dImpl);
TESSERA_MODULE_IMPL(ConvTranspose2d, torch::nn::ConvTranspose2dImpl);
TESSERA_MODULE_IMPL(ConvTranspose3d, torch::nn::ConvTranspose3dImpl);

}  // namespace tessera::nn
