#pragma once
// Values for tests that compare models, equal on every rank.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace tessera::testing {

/// Fills parameters with values of standard deviation `scale` that depend only on `seed`, position and sizes.
void fill_parameters(torch::nn::Module& module, uint64_t seed, double scale = 0.3);

/// Returns a weighted mean of squares and values, whose gradient is nonzero everywhere.
at::Tensor weighted_loss(const at::Tensor& out);

}  // namespace tessera::testing
