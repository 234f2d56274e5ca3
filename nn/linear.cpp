#include "nn/linear.h"

template class tessera::detail::HookedModule<torch::nn::LinearImpl, tessera::Hooked<torch::nn::LinearImpl>>;
template class tessera::Hooked<torch::nn::LinearImpl>;
