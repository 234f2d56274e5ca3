#pragma once
// Where a strided copy between two tensors reads and writes.

#include <cstdint>

namespace tessera {

/// to[to_offset + i * to_stride + j] = from[from_offset + i * from_stride + j] for i < rows, j < cols, in elements from
/// a tensor's first one, with a cast.
struct CopyShape {
  int64_t to_offset = 0;
  int64_t to_stride = 0;
  int64_t from_offset = 0;
  int64_t from_stride = 0;
  int64_t rows = 0;
  int64_t cols = 0;
};

}  // namespace tessera
