#pragma once
// The norm of many tensors of a GPU by kernels of their own (cuda/multi_norm.h), where this build has them
// (--config=cuda).

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

namespace tessera {

/// Whether norm_by_kernel() takes tensors of this kind: the same on all ranks of a build.
bool has_norm_kernel(c10::DeviceType device, at::ScalarType dtype, double p);

/// The p-norm of all elements of `tensors` together, on the current stream, as a tensor without dims: float32, or
/// float64 of float64. At least one tensor, contiguous, on one GPU and of one dtype; only where has_norm_kernel().
at::Tensor norm_by_kernel(at::TensorList tensors, double p);

}  // namespace tessera
