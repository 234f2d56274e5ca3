#pragma once
// Computes which elements a thread copies when many strided copies share a kernel. For the CPU and the GPU.
//
// A copy has `rows` rows of `cols` elements. It is split into tiles of up to kTileNumel elements, each part of one row
// or several whole rows, numbered through all copies of a table. Example with tiles of 8192 elements:
//
//   copy 0   2 rows of 10000   tiles 0-1 are row 0 (8192 and 1808 elements), tiles 2-3 are row 1
//   copy 1   5 rows of 3000    tile 4 is rows 0-1, tile 5 is rows 2-3, tile 6 is row 4
//
// A thread block takes a tile, and its threads take accesses of `width` elements in turn: 16 bytes of the wider dtype
// if all addresses allow it, otherwise one element.

#include <cstdint>

#include "cuda/host_device.h"

namespace tessera::cuda {

/// Copies to[i * to_stride + j] = from[i * from_stride + j] for i < rows and j < cols. Strides are in elements of each
/// side's dtype. A null `from` means zeros.
struct StridedCopy {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t to_stride = 0;
  int64_t from_stride = 0;
  int64_t rows = 0;
  int64_t cols = 0;
};

inline constexpr int64_t kTileNumel = 8192;
inline constexpr int kAccessBytes = 16;

/// Part of a copy.
struct CopyTile {
  int64_t row = 0;
  int64_t col = 0;
  int32_t rows = 0;
  int32_t cols = 0;
};

TESSERA_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

TESSERA_HOST_DEVICE int64_t num_tiles(const StridedCopy& copy) {
  if (copy.rows == 0 || copy.cols == 0) {
    return 0;
  }
  return copy.cols >= kTileNumel ? copy.rows * ceil_div(copy.cols, kTileNumel)
                                 : ceil_div(copy.rows, kTileNumel / copy.cols);
}

/// Returns tile `tile` of a copy; it must be below num_tiles(copy).
TESSERA_HOST_DEVICE CopyTile locate_tile(const StridedCopy& copy, int64_t tile) {
  if (copy.cols >= kTileNumel) {
    const int64_t tiles_a_row = ceil_div(copy.cols, kTileNumel);
    const int64_t col = tile % tiles_a_row * kTileNumel, rest = copy.cols - col;
    return {tile / tiles_a_row, col, 1, static_cast<int32_t>(rest < kTileNumel ? rest : kTileNumel)};
  }
  const int64_t rows_a_tile = kTileNumel / copy.cols;
  const int64_t row = tile * rows_a_tile, rest = copy.rows - row;
  return {row, 0, static_cast<int32_t>(rest < rows_a_tile ? rest : rows_a_tile), static_cast<int32_t>(copy.cols)};
}

/// Returns the number of elements in a 16-byte access of a pair of dtypes.
TESSERA_HOST_DEVICE int wide_access(int to_size, int from_size) {
  return kAccessBytes / (to_size > from_size ? to_size : from_size);
}

/// Returns whether accesses of `width` elements are always aligned.
inline bool allows_width(const StridedCopy& copy, int width, int to_size, int from_size) {
  const auto side_allows = [&](const void* address, int64_t stride, int size) {
    return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(width * size) == 0 &&
           (copy.rows <= 1 || stride % width == 0);
  };
  return copy.cols % width == 0 && side_allows(copy.to, copy.to_stride, to_size) &&
         (copy.from == nullptr || side_allows(copy.from, copy.from_stride, from_size));
}

/// Copies of one launch, passed to the kernel by value, so that nothing is sent beforehand.
struct CopyTable {
  static constexpr int kMaxCopies = 64;

  int32_t count = 0;
  int32_t width[kMaxCopies] = {};           // elements per access
  int64_t first_tile[kMaxCopies + 1] = {};  // of each copy, then the number of all tiles
  StridedCopy copies[kMaxCopies] = {};

  bool full() const { return count == kMaxCopies; }
  int64_t tiles() const { return first_tile[count]; }
  /// Adds a copy. Must not be called if full().
  void add(const StridedCopy& copy, int to_size, int from_size) {
    const int wide = wide_access(to_size, from_size);
    width[count] = allows_width(copy, wide, to_size, from_size) ? wide : 1;
    first_tile[count + 1] = first_tile[count] + num_tiles(copy);
    copies[count++] = copy;
  }
};
static_assert(sizeof(CopyTable) <= 4096, "what a kernel takes as arguments on every GPU");

/// Returns the last index with first[index] <= tile, where first[count] > tile. This skips copies without tiles.
TESSERA_HOST_DEVICE int find_owner(const int64_t* first, int count, int64_t tile) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Elements that are loaded and stored together.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T items[kWidth];
};

/// Casts through float; equal dtypes are copied.
template <typename To, typename From>
TESSERA_HOST_DEVICE To cast_item(From from) {
  return static_cast<To>(static_cast<float>(from));
}
template <>
TESSERA_HOST_DEVICE uint8_t cast_item<uint8_t, uint8_t>(uint8_t from) {
  return from;
}
template <>
TESSERA_HOST_DEVICE uint16_t cast_item<uint16_t, uint16_t>(uint16_t from) {
  return from;
}
template <>
TESSERA_HOST_DEVICE uint32_t cast_item<uint32_t, uint32_t>(uint32_t from) {
  return from;
}
template <>
TESSERA_HOST_DEVICE uint64_t cast_item<uint64_t, uint64_t>(uint64_t from) {
  return from;
}

/// Copies thread `thread`'s elements of a tile.
template <typename To, typename From, int kWidth>
TESSERA_HOST_DEVICE void copy_tile(const StridedCopy& copy, int64_t tile, int thread, int threads) {
  const CopyTile part = locate_tile(copy, tile);
  const int accesses_a_row = part.cols / kWidth, accesses = part.rows * accesses_a_row;
  for (int access = thread; access < accesses; access += threads) {
    const int row = access / accesses_a_row, col = (access - row * accesses_a_row) * kWidth;
    To* const to = static_cast<To*>(copy.to) + (part.row + row) * copy.to_stride + part.col + col;
    Pack<To, kWidth> out = {};
    if (copy.from != nullptr) {
      const From* const from =
          static_cast<const From*>(copy.from) + (part.row + row) * copy.from_stride + part.col + col;
      const auto in = *reinterpret_cast<const Pack<From, kWidth>*>(from);
      for (int i = 0; i < kWidth; ++i) {
        out.items[i] = cast_item<To, From>(in.items[i]);
      }
    }
    *reinterpret_cast<Pack<To, kWidth>*>(to) = out;
  }
}

/// Copies thread `thread`'s elements of tile `tile` of a table.
template <typename To, typename From>
TESSERA_HOST_DEVICE void copy_table_tile(const CopyTable& table, int64_t tile, int thread, int threads) {
  constexpr int kWide = kAccessBytes / static_cast<int>(sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
  const int owner = find_owner(table.first_tile, table.count, tile);
  const int64_t own_tile = tile - table.first_tile[owner];
  if (table.width[owner] == 1) {
    copy_tile<To, From, 1>(table.copies[owner], own_tile, thread, threads);
  } else {
    copy_tile<To, From, kWide>(table.copies[owner], own_tile, thread, threads);
  }
}

}  // namespace tessera::cuda
