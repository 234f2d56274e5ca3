#include "fused/gpu/rotary_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace tessera::fused {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;

template <class T, int kWide>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const __grid_constant__ RotaryRows of) {
  rotate_by_thread<T, kWide>(of, static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                             static_cast<int64_t>(gridDim.x) * kThreads);
}

template <class T, int kWide>
cudaError_t launch_accesses(const RotaryRows& of, cudaStream_t stream) {
  const int64_t wanted = cuda::ceil_div(of.count() * accesses_of_row(of, kWide), kThreads);
  const auto blocks = static_cast<unsigned>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
  rotary_kernel<T, kWide><<<blocks, kThreads, 0, stream>>>(of);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch(const RotaryRows& of, cudaStream_t stream) {
  constexpr int kWide = cuda::kAccessBytes / static_cast<int>(sizeof(T));
  return allows_accesses(of, kWide, sizeof(T)) ? launch_accesses<T, kWide>(of, stream)
                                               : launch_accesses<T, 1>(of, stream);
}

}  // namespace

cudaError_t launch_rotation(const RotaryRows& of, KernelDtype dtype, cudaStream_t stream) {
  if (of.count() * of.row_size == 0) {
    return cudaSuccess;
  }
  switch (dtype) {
    case KernelDtype::Float32:
      return launch<float>(of, stream);
    case KernelDtype::BFloat16:
      return launch<c10::BFloat16>(of, stream);
    case KernelDtype::Float16:
      return launch<c10::Half>(of, stream);
    case KernelDtype::Float64:
      return launch<double>(of, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace tessera::fused
