#pragma once
// Computes what one thread computes of rotary positions. For the CPU and the GPU.
//
// Threads take accesses of 16 bytes in turn if all rows, their halves and the tables are aligned to them, otherwise
// elements: pairs of the rotated ones, then the others.

#include <cstdint>

#include "fused/cpu/rotary_rows.h"
#include "fused/gpu/norm_tile.h"

namespace tessera::fused {

/// Rotates `kWide` pairs from `first` on, or copies elements after them.
template <class T, int kWide>
TESSERA_HOST_DEVICE void rotate_access(const RotaryRows& of, const T* x, const T* cos, const T* sin, T* out,
                                       int64_t first) {
  const int64_t half = of.rotated / 2;
  if (first >= half) {
    Numbers<T, kWide>::load(x + half + first).store(out + half + first);
    return;
  }
  const auto lefts = Numbers<T, kWide>::load(x + first), rights = Numbers<T, kWide>::load(x + half + first);
  const auto cosines = Numbers<T, kWide>::load(cos + first), sines = Numbers<T, kWide>::load(sin + first);
  Numbers<T, kWide> new_lefts, new_rights;
  for (int i = 0; i < kWide; ++i) {
    const auto sine = of.back ? -sines.items[i] : sines.items[i];
    new_lefts.items[i] = lefts.items[i] * cosines.items[i] - rights.items[i] * sine;
    new_rights.items[i] = rights.items[i] * cosines.items[i] + lefts.items[i] * sine;
  }
  new_lefts.store(out + first);
  new_rights.store(out + half + first);
}

/// Returns how many accesses of `wide` a row has.
TESSERA_HOST_DEVICE int64_t accesses_of_row(const RotaryRows& of, int wide) {
  return (of.row_size - of.rotated / 2) / wide;
}

/// Rotates the part of thread `thread` of `threads`.
template <class T, int kWide>
TESSERA_HOST_DEVICE void rotate_by_thread(const RotaryRows& of, int64_t thread, int64_t threads) {
  const int64_t of_row = accesses_of_row(of, kWide), count = of.sizes[0] * of.sizes[1] * of.sizes[2] * of_row;
  for (int64_t access = thread; access < count; access += threads) {
    const int64_t row = access / of_row;
    const int64_t index[3] = {row / of.sizes[2] / of.sizes[1], row / of.sizes[2] % of.sizes[1], row % of.sizes[2]};
    int64_t x = 0, out = 0, table = 0;
    for (int dim = 0; dim < 3; ++dim) {
      x += index[dim] * of.x_strides[dim];
      out += index[dim] * of.out_strides[dim];
      table += index[dim] * of.table_strides[dim];
    }
    rotate_access<T, kWide>(of, static_cast<const T*>(of.x) + x, static_cast<const T*>(of.cos) + table,
                            static_cast<const T*>(of.sin) + table, static_cast<T*>(of.out) + out,
                            access % of_row * kWide);
  }
}

/// Returns whether accesses of `wide` elements of `size` bytes are aligned.
inline bool allows_accesses(const RotaryRows& of, int wide, int size) {
  bool result = of.rotated % (2 * wide) == 0 && of.row_size % wide == 0;
  for (const void* address : {of.x, of.cos, of.sin, static_cast<const void*>(of.out)}) {
    result = result && reinterpret_cast<uintptr_t>(address) % (wide * size) == 0;
  }
  for (int dim = 0; dim < 3; ++dim) {
    result = result && of.x_strides[dim] % wide == 0 && of.out_strides[dim] % wide == 0;
  }
  return result;
}

}  // namespace tessera::fused
