#pragma once
// The norm of many CUDA tensors in two kernels for 160 tensors, for clipping gradients by their norm.
//
//   at::Tensor squares = multi_tensor_norm(local_gradients, NormKind::L2);   // [] on the GPU: the sum of squares
//   all_reduce(squares, ReduceOp::Sum, group);                               // of the shards of all ranks
//   at::Tensor norm = squares.sqrt();
//
// The host waits for nothing. The result depends on sizes, values, and whether each tensor begins at a multiple of 16
// bytes, so that it is the same bits each time.

#include <ATen/core/Tensor.h>

#include "cuda/norm_tile.h"

namespace tessera::cuda {

/// What the norm is made from, and what ranks combine: the sum of absolute values (L1), the sum of squares (L2), the
/// largest absolute value (Inf; 0 of no elements). A tensor of no dims on the tensors' device, float32, or float64 for
/// float64 tensors; sums are kept in that dtype. A NaN gives NaN.
///
/// `tensors`: at least one; dense and contiguous, on one CUDA device, of one dtype among float32, bfloat16, float16 and
/// float64. On the current stream; one buffer of at most 4 or 8 KiB for each 160 tensors comes from the caching
/// allocator. Throws ValueError for tensors that are not so.
at::Tensor multi_tensor_norm(at::TensorList tensors, NormKind kind);

/// Whether multi_tensor_norm has it.
bool has_norm(at::ScalarType dtype);

}  // namespace tessera::cuda
