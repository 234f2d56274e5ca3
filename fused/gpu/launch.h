#pragma once
// Helpers for launching kernels of the fused ops on tensors.

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/device.h"
#include "fused/gpu/kernel_dtype.h"

namespace tessera::fused {

/// Returns the kernel dtype of a tensor, whose dtype was checked before.
inline KernelDtype kernel_dtype(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return dtype == at::kFloat      ? KernelDtype::Float32
         : dtype == at::kBFloat16 ? KernelDtype::BFloat16
         : dtype == at::kHalf     ? KernelDtype::Float16
                                  : KernelDtype::Float64;
}

/// Calls launch(stream) for the current stream of the tensor's device. Throws StateError unless it succeeds.
template <class Launch>
void launch_on(const at::Tensor& tensor, const char* op, Launch launch) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  cuda::check_cuda(launch(c10::cuda::getCurrentCUDAStream().stream()), op);
}

}  // namespace tessera::fused
