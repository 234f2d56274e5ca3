#pragma once
// Strided copies between tensors of a GPU as kernels of their own (cuda/multi_copy.h), where this build has them
// (--config=cuda).

#include <ATen/core/Tensor.h>

#include <span>

#include "cuda/copy_shape.h"

namespace tessera {

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
