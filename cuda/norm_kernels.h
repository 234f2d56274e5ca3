#pragma once
// Launches the norm of a table of tensors (norm_tile.h).

#include <cuda_runtime_api.h>

#include "cuda/norm_tile.h"

namespace tessera::cuda {

enum class NormDtype { Float32, BFloat16, Float16, Float64 };

/// Thread blocks that a table of so many tiles is run by; each leaves one partial result.
int norm_blocks(int64_t tiles);

/// partials[0, norm_blocks(table.tiles())) = partial results, float, or double for Float64.
cudaError_t launch_norm(const NormTable& table, NormDtype dtype, NormKind kind, void* partials, cudaStream_t stream);

/// *result = all partial results combined, 0 of none: the sum of absolute values (L1), of squares (L2), or the largest
/// absolute value (Inf).
cudaError_t launch_norm_result(const void* partials, int64_t count, NormDtype dtype, NormKind kind, void* result,
                               cudaStream_t stream);

}  // namespace tessera::cuda
