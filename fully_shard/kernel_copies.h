#pragma once
// Strided copies between tensors of a GPU as kernels of their own (cuda/multi_copy.h), where this build has them
// (--config=cuda).

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

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

/// Tensors are contiguous. An undefined `from` stands for zeros.
struct TensorCopy {
  at::Tensor to;
  at::Tensor from;
  CopyShape shape;
};

/// Launches them on the current stream, and returns true. Returns false, and does nothing, in a build without kernels,
/// and where one of the copies is not within one GPU or between dtypes that have no kernel.
bool copy_by_kernels(std::span<const TensorCopy> copies);

}  // namespace tessera
