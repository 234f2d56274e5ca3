#pragma once
// Launches the normalization of rows (norm_tile.h).

#include <cuda_runtime_api.h>

#include "fused/gpu/kernel_dtype.h"
#include "fused/gpu/norm_tile.h"

namespace tessera::fused {

cudaError_t launch_norm(const NormRows& of, KernelDtype dtype, cudaStream_t stream);

cudaError_t launch_norm_gradient(const NormGradientRows& of, KernelDtype dtype, cudaStream_t stream);

/// Writes terms [terms, features] of the weight's gradient, each of `rows_of_term` rows, in the dtype of sums.
cudaError_t launch_weight_gradient(const NormGradientRows& of, int64_t rows_of_term, void* terms, KernelDtype dtype,
                                   cudaStream_t stream);

}  // namespace tessera::fused
