#pragma once
// Norms of many CUDA tensors by one kernel (cuda/multi_norm.h), if this build has CUDA.

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

namespace tessera {

bool has_norm_kernel(c10::DeviceType device, at::ScalarType dtype, double p);  // equal on all ranks

/// Returns the p-norm of all elements as a scalar. Tensors are contiguous, on one GPU, of one supported dtype.
at::Tensor norm_by_kernel(at::TensorList tensors, double p);

}  // namespace tessera
