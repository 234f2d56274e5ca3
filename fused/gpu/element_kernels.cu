#include "fused/gpu/element_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace tessera::fused {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;  // of a GPU's 100 to 200 multiprocessors

template <class Op, class T>
__global__ void __launch_bounds__(kThreads)
    element_kernel(const __grid_constant__ ElementOperands<Op::kIn, Op::kOut> of, bool is_aligned) {
  compute_elements<Op, T>(of, is_aligned, static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                          static_cast<int64_t>(gridDim.x) * kThreads);
}

template <class Op, class T>
cudaError_t launch(const ElementOperands<Op::kIn, Op::kOut>& of, cudaStream_t stream) {
  constexpr int64_t kWide = cuda::kAccessBytes / sizeof(T);
  const int64_t wanted = cuda::ceil_div(of.count, kWide * kThreads);
  const auto blocks = static_cast<unsigned>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
  element_kernel<Op, T><<<blocks, kThreads, 0, stream>>>(of, of.is_aligned());
  return cudaGetLastError();
}

}  // namespace

template <class Op>
cudaError_t launch_elements(const ElementOperands<Op::kIn, Op::kOut>& of, KernelDtype dtype, cudaStream_t stream) {
  if (of.count == 0) {
    return cudaSuccess;
  }
  switch (dtype) {
    case KernelDtype::Float32:
      return launch<Op, float>(of, stream);
    case KernelDtype::BFloat16:
      return launch<Op, c10::BFloat16>(of, stream);
    case KernelDtype::Float16:
      return launch<Op, c10::Half>(of, stream);
    case KernelDtype::Float64:
      return launch<Op, double>(of, stream);
  }
  return cudaErrorInvalidValue;
}

template cudaError_t launch_elements<SwigluForward>(const ElementOperands<2, 1>&, KernelDtype, cudaStream_t);
template cudaError_t launch_elements<SwigluBackward>(const ElementOperands<3, 2>&, KernelDtype, cudaStream_t);
template cudaError_t launch_elements<TanhGegluForward>(const ElementOperands<2, 1>&, KernelDtype, cudaStream_t);
template cudaError_t launch_elements<TanhGegluBackward>(const ElementOperands<3, 2>&, KernelDtype, cudaStream_t);

}  // namespace tessera::fused
