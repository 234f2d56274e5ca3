#pragma once
// Draws random numbers of a rank's shard alone with a CUDA kernel (cuda/sharded_draw.h), if this build has CUDA.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "cuda/draw_request.h"

namespace tessera {

/// Fills `local` and returns true. Returns false, without any change, without the kernel or if it does not reproduce
/// ATen's draw of the whole tensor.
bool draw_by_kernel(const at::Tensor& local, const ShardOfWhole& shard, const DrawParameters& parameters,
                    const at::Generator& generator);

}  // namespace tessera
