#pragma once
// Random numbers for one shard of a CUDA tensor: those that ATen draws for the whole tensor on this GPU with the same
// generator, without the memory for it.
//
//   // rows 40 to 80 of a weight [320, 1024], on one of 8 ranks
//   draw_shard(rows, {.sizes = {40, 1024}, .whole_strides = {1024, 1}, .local_strides = {1024, 1},
//                     .whole_offset = 40 * 1024, .whole_numel = 320 * 1024},
//              {Distribution::Normal, 0.0, 0.02}, generator);
//
// Which number of which sequence an element gets is ATen's own affair: it depends on the launch, and a later version
// may change it. So the first draw of each distribution and dtype on a GPU is preceded by one of some 10 MB that both
// make; where they differ, draw_shard warns once and draws nothing from then on. The host waits for that comparison,
// and for nothing else.
//
// The numbers come from cuRAND's generator for kernels, the one ATen uses (Philox4x32-10: Salmon et al., Parallel
// random numbers: as easy as 1, 2, 3, SC 2011).

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "cuda/draw_request.h"

namespace tessera::cuda {

/// Writes `local`, a tensor on a CUDA device of the sizes and strides of `shard`, on the current stream, moves the
/// generator to where the whole tensor's draw would leave it, and returns true. Returns false, having done nothing, for
/// a dtype other than float32, bfloat16, float16, float64 and, for Bernoulli, bool; for a shard that a launch cannot
/// describe (draw_table.h); and where ATen draws in another way. Parameters are not checked.
/// Thread safety: any thread; the generator's mutex is held while its offset moves. Throws StateError (the CUDA runtime
/// refuses).
bool draw_shard(const at::Tensor& local, const ShardOfWhole& shard, const DrawParameters& parameters,
                at::Generator generator);

}  // namespace tessera::cuda
