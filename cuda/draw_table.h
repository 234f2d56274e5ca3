#pragma once
// Computes how ATen would fill a whole tensor with random numbers on a GPU, and which part is a shard. Integers only.

#include <cstdint>
#include <optional>
#include <vector>

#include "cuda/draw_request.h"
#include "cuda/draw_tile.h"

namespace tessera::cuda {

/// Properties of a GPU that ATen's launch depends on.
struct GpuSize {
  int64_t multiprocessors = 0;
  int64_t threads_each = 0;  // resident at the same time
};

/// Items of a tensor, and the generator that fills it.
struct DrawSource {
  int64_t item_bytes = 0;
  int width = 0;  // numbers per draw: 2 for float64, otherwise 4
  uint64_t seed = 0;
  uint64_t offset = 0;
};

/// Returns the table. It is nullopt if the shard has more dims (after merging) or the whole tensor more pieces than a
/// table holds.
std::optional<DrawTable> draw_table(const ShardOfWhole& shard, const GpuSize& gpu, const DrawSource& source);

/// Returns the generator's offset after the whole tensor.
uint64_t offset_after(int64_t whole_numel, const GpuSize& gpu, const DrawSource& source);

/// Part of a tensor that ATen fills with one launch.
struct DrawPiece {
  int64_t begin = 0;
  int64_t numel = 0;
};

/// Splits a contiguous tensor in halves until 32 bits can address each, in order (SplitUntil32Bit in
/// ATen/TensorIterator.h).
std::vector<DrawPiece> draw_pieces(int64_t numel, int64_t item_bytes);

}  // namespace tessera::cuda
