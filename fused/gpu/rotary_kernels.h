#pragma once
// Launches the rotation of rows (rotary_tile.h).

#include <cuda_runtime_api.h>

#include "fused/gpu/kernel_dtype.h"
#include "fused/gpu/rotary_tile.h"

namespace tessera::fused {

cudaError_t launch_rotation(const RotaryRows& of, KernelDtype dtype, cudaStream_t stream);

}  // namespace tessera::fused
