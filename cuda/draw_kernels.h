#pragma once
// Launches the kernel that draws a shard of a random tensor.

#include <cuda_runtime_api.h>

#include "cuda/draw_request.h"
#include "cuda/draw_tile.h"

namespace tessera::cuda {

enum class DrawDtype { Float32, BFloat16, Float16, Float64, Bool };

/// Returns the number of values that one of ATen's draws produces.
int draw_width(DrawDtype dtype);

/// Draws the table's shard into `local` on `stream`. Returns cudaErrorInvalidValue for bool other than Bernoulli.
cudaError_t launch_draw(const DrawTable& table, DrawDtype dtype, const DrawParameters& parameters, void* local,
                        cudaStream_t stream);

}  // namespace tessera::cuda
