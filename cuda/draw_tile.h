#pragma once
// Computes which random number ATen gives to an element of a whole tensor. Integers only, for the CPU and the GPU.
//
// ATen fills a tensor by `threads` threads (distribution_elementwise_grid_stride_kernel in
// ATen/native/cuda/DistributionTemplates.h). Thread t draws from sequence t of a Philox generator, `width` numbers at a
// time, for elements t, t + threads, t + 2 * threads, ..., and then advances by threads * width elements. Example with
// 4 threads of width 2:
//
//   element      0  1  2  3  4  5  6  7  8  9 10 11 ...
//   sequence     0  1  2  3  0  1  2  3  0  1  2  3
//   draw         0  0  0  0  0  0  0  0  1  1  1  1
//   number       0  0  0  0  1  1  1  1  0  0  0  0
//
// So each element depends only on its place in the whole tensor, whichever part a rank has. Tensors that need more than
// 32 bits to address are filled in pieces, with a grid and an offset each (draw_table.h).

#include <cstdint>

#include "cuda/host_device.h"
#include "cuda/strided_copy.h"

namespace tessera::cuda {

/// Advance of a Philox generator's offset per draw.
inline constexpr uint64_t kOffsetsADraw = 4;

/// Draws of one launch; passed to the kernel by value.
struct DrawTable {
  static constexpr int kMaxDims = 8;
  static constexpr int kMaxPieces = 64;

  uint64_t seed = 0;
  // The shard, as in ShardOfWhole.
  int64_t numel = 0;
  int64_t whole_offset = 0;
  int32_t dims = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t whole_strides[kMaxDims] = {};
  int64_t local_strides[kMaxDims] = {};
  // How ATen fills the whole tensor.
  int32_t width = 0;
  int64_t threads = 0;
  int32_t pieces = 0;
  int64_t first_element[kMaxPieces + 1] = {};  // of each piece, then the number of all elements
  uint64_t offset[kMaxPieces] = {};            // of the generator, where the piece begins
};
static_assert(sizeof(DrawTable) <= 4000, "with the kernel's other arguments");

/// Returns number `lane` that a generator gives at `offset` of `sequence`.
struct DrawPlace {
  uint64_t sequence = 0;
  uint64_t offset = 0;
  int lane = 0;
  bool operator==(const DrawPlace&) const = default;
};

/// Sequence, offset and lane of an element of the whole tensor.
TESSERA_HOST_DEVICE DrawPlace draw_place(const DrawTable& table, int64_t element) {
  const int piece = find_owner(table.first_element, table.pieces, element);
  const int64_t index = element - table.first_element[piece], a_draw = table.threads * table.width;
  const int64_t draw = index / a_draw, rest = index - draw * a_draw, lane = rest / table.threads;
  return {static_cast<uint64_t>(rest - lane * table.threads),
          table.offset[piece] + static_cast<uint64_t>(draw) * kOffsetsADraw, static_cast<int>(lane)};
}

/// Place of a shard's element in the shard's memory and in the whole tensor's.
struct ShardPlace {
  int64_t local = 0;
  int64_t whole = 0;
};

/// Returns the places of an element; `index` counts the shard's elements, last dim fastest.
TESSERA_HOST_DEVICE ShardPlace shard_place(const DrawTable& table, int64_t index) {
  ShardPlace place = {0, table.whole_offset};
  for (int dim = table.dims - 1; dim >= 0; --dim) {
    const int64_t rest = index / table.sizes[dim], coordinate = index - rest * table.sizes[dim];
    place.local += coordinate * table.local_strides[dim];
    place.whole += coordinate * table.whole_strides[dim];
    index = rest;
  }
  return place;
}

/// Fills thread `thread`'s elements of the shard: local[...] = item(draw(seed, place)).
template <typename T, typename Draw, typename Item>
TESSERA_HOST_DEVICE void draw_elements(const DrawTable& table, int64_t thread, int64_t threads, T* local,
                                       const Draw& draw, const Item& item) {
  for (int64_t index = thread; index < table.numel; index += threads) {
    const ShardPlace place = shard_place(table, index);
    local[place.local] = item(draw(table.seed, draw_place(table, place.whole)));
  }
}

// Transforms normal numbers, or uniform ones over (0, 1], with the same order of operations as ATen.

template <typename T, typename Number>
struct NormalItem {
  Number mean, deviation;
  TESSERA_HOST_DEVICE T operator()(Number drawn) const { return static_cast<T>(drawn * deviation + mean); }
};

/// Transforms to [from, to).
template <typename T, typename Number>
struct UniformItem {
  T from, to;
  Number range;
  TESSERA_HOST_DEVICE T operator()(Number drawn) const {
    const T value = static_cast<T>(drawn * range + static_cast<Number>(from));
    return static_cast<Number>(value) == static_cast<Number>(to) ? from : value;
  }
};

template <typename T, typename Number>
struct BernoulliItem {
  Number probability;
  TESSERA_HOST_DEVICE T operator()(Number drawn) const { return static_cast<T>(drawn < probability); }
};

}  // namespace tessera::cuda
