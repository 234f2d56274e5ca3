#pragma once
// torch::nn's normalization layers with a hook point, and with the same constructors, members and results.

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/normalization.h>

#include "nn/hooks/hooked.h"

namespace tessera::nn {

using torch::nn::BatchNormOptions;
using torch::nn::GroupNormOptions;
using torch::nn::InstanceNormOptions;
using torch::nn::LayerNormOptions;
using torch::nn::LocalResponseNormOptions;

TESSERA_MODULE_IMPL(BatchNorm1d, torch::nn::BatchNorm1dImpl);
TESSERA_MODULE_IMPL(BatchNorm2d, torch::nn::BatchNorm2dImpl);
TESSERA_MODULE_IMPL(BatchNorm3d, torch::nn::BatchNorm3dImpl);
TESSERA_MODULE_IMPL(GroupNorm, torch::nn::GroupNormImpl);
TESSERA_MODULE_IMPL(InstanceNorm1d, torch::nn::InstanceNorm1dImpl);
TESSERA_MODULE_IMPL(InstanceNorm2d, torch::nn::InstanceNorm2dImpl);
TESSERA_MODULE_IMPL(InstanceNorm3d, torch::nn::InstanceNorm3dImpl);
TESSERA_MODULE_IMPL(LayerNorm, torch::nn::LayerNormImpl);
TESSERA_MODULE_IMPL(LocalResponseNorm, torch::nn::LocalResponseNormImpl);

}  // namespace tessera::nn
