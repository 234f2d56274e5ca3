#pragma once
// Random numbers for a rank's shard alone, by a kernel of a GPU (cuda/sharded_draw.h), where this build has it
// (--config=cuda).

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "cuda/draw_request.h"

namespace tessera {

/// Writes `local` and returns true; returns false, having done nothing, in a build without the kernel and where it does
/// not draw what ATen draws for the whole tensor.
bool draw_by_kernel(const at::Tensor& local, const ShardOfWhole& shard, const DrawParameters& parameters,
                    const at::Generator& generator);

}  // namespace tessera
