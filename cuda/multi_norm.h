#pragma once
// Norms of many CUDA tensors with two kernels per 160 tensors, for gradient clipping.
//
//   at::Tensor squares = multi_tensor_norm(local_gradients, NormKind::L2);  // [] on the GPU: the sum of squares
//   all_reduce(squares, ReduceOp::Sum, group);
//   at::Tensor norm = squares.sqrt();
//
// The host does not wait. Results are reproducible bit by bit for equal sizes, values and 16-byte alignments.

#include <ATen/core/Tensor.h>

#include "cuda/norm_tile.h"

namespace tessera::cuda {

/// Returns the sum of absolute values (L1) or squares (L2), or the largest absolute value (Inf; 0 without elements). It
/// is a scalar on the GPU, float64 for float64 tensors and otherwise float32. NaN gives NaN.
/// Takes at least one contiguous tensor, on one CUDA device, of one dtype among float32, bfloat16, float16 and float64.
/// Allocates up to 8 KiB per 160 tensors. Throws ValueError otherwise.
at::Tensor multi_tensor_norm(at::TensorList tensors, NormKind kind);

bool has_norm(at::ScalarType dtype);  // supported by multi_tensor_norm

}  // namespace tessera::cuda
