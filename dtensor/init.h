#pragma once
// The functions of torch::nn::init that need a whole parameter, for DTensors; the others accept DTensors themselves.
// Values equal one device's for the same seed (random.h). Throws ValueError on every rank for wrong dims or Partial.
// Thread safety: like writing the parameter; all ranks must call.

#include <ATen/core/Tensor.h>

namespace tessera::init {

at::Tensor orthogonal_(at::Tensor tensor, double gain = 1);  // semi-orthogonal matrix times gain; 2 or more dims

at::Tensor eye_(at::Tensor tensor);  // 2 dims

at::Tensor dirac_(at::Tensor tensor);  // a convolution's weight, 3 to 5 dims

}  // namespace tessera::init
