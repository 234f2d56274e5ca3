#pragma once
// Strided copies between GPU tensors with custom kernels (cuda/multi_copy.h), if this build has them (--config=cuda).

#include <ATen/core/Tensor.h>

#include <span>

#include "cuda/copy_shape.h"

namespace tessera {

/// Copy between contiguous tensors. An undefined `from` means zeros.
struct TensorCopy {
  at::Tensor to;
  at::Tensor from;
  CopyShape shape;
};

/// Launches the copies on the current stream and returns true. Returns false, without copying, in a build without
/// kernels, or if a copy is not within one GPU or has dtypes without a kernel.
bool copy_by_kernels(std::span<const TensorCopy> copies);

}  // namespace tessera
