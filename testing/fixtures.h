#pragma once
// Values for tests that compare models: the same on every rank, and a loss whose gradient does not vanish.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace tessera::testing {

/// Gives every parameter of `module` values that depend only on `seed`, its place and its sizes. Models of ranks that
/// are threads become equal so (the default generator is shared between threads). `scale`: their standard deviation.
void fill_parameters(torch::nn::Module& module, uint64_t seed, double scale = 0.3);

/// Mean of squares and of values, weighted element by element: its gradient is nowhere zero.
at::Tensor weighted_loss(const at::Tensor& out);

}  // namespace tessera::testing
