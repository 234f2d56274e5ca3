#pragma once
// torch::nn's common pooling layers with a hook point, and with the same constructors, members and results.

#include <torch/nn/modules/pooling.h>

#include "nn/hooks/hooked.h"

namespace tessera::nn {

using torch::nn::AdaptiveAvgPool1dOptions;
using torch::nn::AdaptiveAvgPool2dOptions;
using torch::nn::AdaptiveAvgPool3dOptions;
using torch::nn::AdaptiveMaxPool1dOptions;
using torch::nn::AdaptiveMaxPool2dOptions;
using torch::nn::AdaptiveMaxPool3dOptions;
using torch::nn::AvgPool1dOptions;
using torch::nn::AvgPool2dOptions;
using torch::nn::AvgPool3dOptions;
using torch::nn::MaxPool1dOptions;
using torch::nn::MaxPool2dOptions;
using torch::nn::MaxPool3dOptions;

TESSERA_MODULE_IMPL(AdaptiveAvgPool1d, torch::nn::AdaptiveAvgPool1dImpl);
TESSERA_MODULE_IMPL(AdaptiveAvgPool2d, torch::nn::AdaptiveAvgPool2dImpl);
TESSERA_MODULE_IMPL(AdaptiveAvgPool3d, torch::nn::AdaptiveAvgPool3dImpl);
TESSERA_MODULE_IMPL(AdaptiveMaxPool1d, torch::nn::AdaptiveMaxPool1dImpl);
TESSERA_MODULE_IMPL(AdaptiveMaxPool2d, torch::nn::AdaptiveMaxPool2dImpl);
TESSERA_MODULE_IMPL(AdaptiveMaxPool3d, torch::nn::AdaptiveMaxPool3dImpl);
TESSERA_MODULE_IMPL(AvgPool1d, torch::nn::AvgPool1dImpl);
TESSERA_MODULE_IMPL(AvgPool2d, torch::nn::AvgPool2dImpl);
TESSERA_MODULE_IMPL(AvgPool3d, torch::nn::AvgPool3dImpl);
TESSERA_MODULE_IMPL(MaxPool1d, torch::nn::MaxPool1dImpl);
TESSERA_MODULE_IMPL(MaxPool2d, torch::nn::MaxPool2dImpl);
TESSERA_MODULE_IMPL(MaxPool3d, torch::nn::MaxPool3dImpl);

}  // namespace tessera::nn
