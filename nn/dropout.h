#pragma once
// torch::nn's dropout layers with a hook point, and with the same constructors, members and results.

#include <torch/nn/modules/dropout.h>

#include "nn/hooks/hooked.h"

namespace tessera::nn {

using torch::nn::AlphaDropoutOptions;
using torch::nn::DropoutOptions;
using torch::nn::FeatureAlphaDropoutOptions;

TESSERA_MODULE_IMPL(AlphaDropout, torch::nn::AlphaDropoutImpl);
TESSERA_MODULE_IMPL(Dropout, torch::nn::DropoutImpl);
TESSERA_MODULE_IMPL(Dropout2d, torch::nn::Dropout2dImpl);
TESSERA_MODULE_IMPL(Dropout3d, torch::nn::Dropout3dImpl);
TESSERA_MODULE_IMPL(FeatureAlphaDropout, torch::nn::FeatureAlphaDropoutImpl);

}  // namespace tessera::nn
