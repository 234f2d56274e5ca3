#pragma once
// How ATen would fill a whole tensor with random numbers on a GPU, and which of it is a shard: integers only.

#include <cstdint>
#include <optional>
#include <vector>

#include "cuda/draw_request.h"
#include "cuda/draw_tile.h"

namespace tessera::cuda {

/// What ATen's launch depends on.
struct GpuSize {
  int64_t multiprocessors = 0;
  int64_t threads_each = 0;  // at most at one time
};

/// A tensor's items, and the generator that fills it.
struct DrawSource {
  int64_t item_bytes = 0;
  int width = 0;  // numbers of one draw: 2 of float64, else 4
  uint64_t seed = 0;
  uint64_t offset = 0;
};

/// nullopt for a shard that has more dims (counted without those that are one in memory) or whose whole tensor has more
/// pieces than a table takes.
std::optional<DrawTable> draw_table(const ShardOfWhole& shard, const GpuSize& gpu, const DrawSource& source);

/// The generator's offset after the whole tensor.
uint64_t offset_after(int64_t whole_numel, const GpuSize& gpu, const DrawSource& source);

/// A part of a tensor that ATen fills at once.
struct DrawPiece {
  int64_t begin = 0;
  int64_t numel = 0;
};

/// TensorIterator's parts of a contiguous tensor that 32 bits can address: halves of halves, in order
/// (SplitUntil32Bit in ATen/TensorIterator.h).
std::vector<DrawPiece> draw_pieces(int64_t numel, int64_t item_bytes);

}  // namespace tessera::cuda
