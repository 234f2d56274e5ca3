#pragma once
// torch::nn's linear layers with a hook point, and with the same constructors, members and results. Exception: Linear
// rounds once, like Python's (nn/hooks/python_forward.h).

#include <torch/nn/modules/linear.h>

#include "nn/hooks/hooked.h"

// Instantiated in nn/linear.cpp: otherwise almost every source that uses modules would compile it again.
extern template class tessera::detail::HookedModule<torch::nn::LinearImpl, tessera::Hooked<torch::nn::LinearImpl>>;
extern template class tessera::Hooked<torch::nn::LinearImpl>;

namespace tessera::nn {

using torch::nn::BilinearOptions;
using torch::nn::FlattenOptions;
using torch::nn::LinearOptions;

TESSERA_MODULE_IMPL(Bilinear, torch::nn::BilinearImpl);
TESSERA_MODULE_IMPL(Flatten, torch::nn::FlattenImpl);
TESSERA_MODULE_IMPL(Identity, torch::nn::IdentityImpl);
TESSERA_MODULE_IMPL(Linear, torch::nn::LinearImpl);

}  // namespace tessera::nn
