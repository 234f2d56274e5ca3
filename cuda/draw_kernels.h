#pragma once
// Launches of the kernel that draws a shard of a tensor of random numbers.

#include <cuda_runtime_api.h>

#include "cuda/draw_request.h"
#include "cuda/draw_tile.h"

namespace tessera::cuda {

enum class DrawDtype { Float32, BFloat16, Float16, Float64, Bool };

/// Numbers of one of ATen's draws.
int draw_width(DrawDtype dtype);

/// Draws the table's shard into `local` on `stream`. Bool is for Bernoulli alone: cudaErrorInvalidValue else.
cudaError_t launch_draw(const DrawTable& table, DrawDtype dtype, const DrawParameters& parameters, void* local,
                        cudaStream_t stream);

}  // namespace tessera::cuda
