#pragma once
// Offsets, strides and sizes of a strided copy between two tensors.

#include <cstdint>

namespace tessera {

/// Copies rows with a cast: to[to_offset + i * to_stride + j] = from[from_offset + i * from_stride + j] for i < rows
/// and j < cols, in elements.
struct CopyShape {
  int64_t to_offset = 0;
  int64_t to_stride = 0;
  int64_t from_offset = 0;
  int64_t from_stride = 0;
  int64_t rows = 0;
  int64_t cols = 0;
};

}  // namespace tessera
