#pragma once
// torch::nn's activations with a hook point, and with the same constructors, members and results.

#include <torch/nn/modules/activation.h>

#include "nn/hooks/hooked.h"

namespace tessera::nn {

using torch::nn::CELUOptions;
using torch::nn::ELUOptions;
using torch::nn::GELUOptions;
using torch::nn::GLUOptions;
using torch::nn::HardshrinkOptions;
using torch::nn::HardtanhOptions;
using torch::nn::LeakyReLUOptions;
using torch::nn::LogSoftmaxOptions;
using torch::nn::PReLUOptions;
using torch::nn::ReLU6Options;
using torch::nn::ReLUOptions;
using torch::nn::RReLUOptions;
using torch::nn::SELUOptions;
using torch::nn::SoftmaxOptions;
using torch::nn::SoftminOptions;
using torch::nn::SoftplusOptions;
using torch::nn::SoftshrinkOptions;
using torch::nn::ThresholdOptions;

TESSERA_MODULE_IMPL(CELU, torch::nn::CELUImpl);
TESSERA_MODULE_IMPL(ELU, torch::nn::ELUImpl);
TESSERA_MODULE_IMPL(GELU, torch::nn::GELUImpl);
TESSERA_MODULE_IMPL(GLU, torch::nn::GLUImpl);
TESSERA_MODULE_IMPL(Hardshrink, torch::nn::HardshrinkImpl);
TESSERA_MODULE_IMPL(Hardtanh, torch::nn::HardtanhImpl);
TESSERA_MODULE_IMPL(LeakyReLU, torch::nn::LeakyReLUImpl);
TESSERA_MODULE_IMPL(LogSigmoid, torch::nn::LogSigmoidImpl);
TESSERA_MODULE_IMPL(LogSoftmax, torch::nn::LogSoftmaxImpl);
TESSERA_MODULE_IMPL(Mish, torch::nn::MishImpl);
TESSERA_MODULE_IMPL(PReLU, torch::nn::PReLUImpl);
TESSERA_MODULE_IMPL(RReLU, torch::nn::RReLUImpl);
TESSERA_MODULE_IMPL(ReLU, torch::nn::ReLUImpl);
TESSERA_MODULE_IMPL(ReLU6, torch::nn::ReLU6Impl);
TESSERA_MODULE_IMPL(SELU, torch::nn::SELUImpl);
TESSERA_MODULE_IMPL(SiLU, torch::nn::SiLUImpl);
TESSERA_MODULE_IMPL(Sigmoid, torch::nn::SigmoidImpl);
TESSERA_MODULE_IMPL(Softmax, torch::nn::SoftmaxImpl);
TESSERA_MODULE_IMPL(Softmax2d, torch::nn::Softmax2dImpl);
TESSERA_MODULE_IMPL(Softmin, torch::nn::SoftminImpl);
TESSERA_MODULE_IMPL(Softplus, torch::nn::SoftplusImpl);
TESSERA_MODULE_IMPL(Softshrink, torch::nn::SoftshrinkImpl);
TESSERA_MODULE_IMPL(Softsign, torch::nn::SoftsignImpl);
TESSERA_MODULE_IMPL(Tanh, torch::nn::TanhImpl);
TESSERA_MODULE_IMPL(Tanhshrink, torch::nn::TanhshrinkImpl);
TESSERA_MODULE_IMPL(Threshold, torch::nn::ThresholdImpl);

}  // namespace tessera::nn
