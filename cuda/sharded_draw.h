#pragma once
// Draws the random numbers of one shard of a CUDA tensor, as ATen would for the whole tensor on this GPU.
//
//   // rows 40 to 80 of a weight [320, 1024], on one of 8 ranks
//   draw_shard(rows, {.sizes = {40, 1024}, .whole_strides = {1024, 1}, .local_strides = {1024, 1},
//                     .whole_offset = 40 * 1024, .whole_numel = 320 * 1024},
//              {Distribution::Normal, 0.0, 0.02}, generator);
//
// The assignment of numbers depends on ATen's launch, which later versions may change. So the first draw of each
// distribution and dtype compares 10 MB with ATen's, for which the host waits. If they differ, draw_shard warns once
// and then always returns false. Numbers come from Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1,
// 2, 3, SC 2011).

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "cuda/draw_request.h"

namespace tessera::cuda {

/// Fills `local` on the current stream, advances the generator as for the whole tensor, and returns true. Returns false
/// without any change for an unsupported dtype (float32, bfloat16, float16, float64 and, for Bernoulli, bool are
/// supported), a shard that a launch cannot describe (draw_table.h), or if ATen draws differently. Does not check
/// parameters.
/// Thread safety: any thread; locks the generator. Throws StateError if the CUDA runtime fails.
bool draw_shard(const at::Tensor& local, const ShardOfWhole& shard, const DrawParameters& parameters,
                at::Generator generator);

}  // namespace tessera::cuda
