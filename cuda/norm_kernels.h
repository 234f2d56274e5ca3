#pragma once
// Launches the norm of a table of tensors (norm_tile.h).

#include <cuda_runtime_api.h>

#include "cuda/norm_tile.h"

namespace tessera::cuda {

enum class NormDtype { Float32, BFloat16, Float16, Float64 };

/// Returns the number of thread blocks for `tiles` tiles; each writes one partial result.
int norm_blocks(int64_t tiles);

/// Writes partials[0, norm_blocks(table.tiles())), as float, or as double for Float64.
cudaError_t launch_norm(const NormTable& table, NormDtype dtype, NormKind kind, void* partials, cudaStream_t stream);

/// Combines the partial results into *result (0 if there are none). It is the sum of absolute values (L1) or of squares
/// (L2), or the largest absolute value (Inf).
cudaError_t launch_norm_result(const void* partials, int64_t count, NormDtype dtype, NormKind kind, void* result,
                               cudaStream_t stream);

}  // namespace tessera::cuda
