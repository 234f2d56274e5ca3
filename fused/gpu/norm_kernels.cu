#include "fused/gpu/norm_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace tessera::fused {

namespace {

constexpr int kThreads = 256;

/// Of the block's threads, in each of them.
template <class Sum>
__device__ Sum add_up_block(Sum term) {
  __shared__ Sum terms[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  terms[thread] = term;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (thread < half) {
      terms[thread] += terms[thread + half];
    }
    __syncthreads();
  }
  return terms[0];
}

template <class T>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ NormRows of) {
  const int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const auto squares = add_up_block(squares_of_thread<T>(of, row, thread, kThreads));
  normalize_by_thread<T>(of, row, squares, thread, kThreads);
}

template <class T>
__global__ void __launch_bounds__(kThreads) gradient_kernel(const __grid_constant__ NormGradientRows of) {
  const int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const auto dot = add_up_block(dot_of_thread<T>(of, row, thread, kThreads));
  differentiate_by_thread<T>(of, row, dot, thread, kThreads);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    weight_kernel(const __grid_constant__ NormGradientRows of, int64_t rows_of_term, Computed<T>* terms) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t begin = blockIdx.y * rows_of_term, end = begin + rows_of_term;
  if (column < of.features) {
    terms[blockIdx.y * of.features + column] = weight_gradient<T>(of, begin, end < of.rows ? end : of.rows, column);
  }
}

/// Calls launch.operator()<T>() with the dtype's type.
template <class Launch>
cudaError_t with_type(KernelDtype dtype, Launch launch) {
  switch (dtype) {
    case KernelDtype::Float32:
      launch.template operator()<float>();
      break;
    case KernelDtype::BFloat16:
      launch.template operator()<c10::BFloat16>();
      break;
    case KernelDtype::Float16:
      launch.template operator()<c10::Half>();
      break;
    case KernelDtype::Float64:
      launch.template operator()<double>();
      break;
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_norm(const NormRows& of, KernelDtype dtype, cudaStream_t stream) {
  if (of.rows == 0) {
    return cudaSuccess;
  }
  return with_type(dtype, [&]<class T>() { norm_kernel<T><<<of.rows, kThreads, 0, stream>>>(of); });
}

cudaError_t launch_norm_gradient(const NormGradientRows& of, KernelDtype dtype, cudaStream_t stream) {
  if (of.rows == 0) {
    return cudaSuccess;
  }
  return with_type(dtype, [&]<class T>() { gradient_kernel<T><<<of.rows, kThreads, 0, stream>>>(of); });
}

cudaError_t launch_weight_gradient(const NormGradientRows& of, int64_t rows_of_term, void* terms, KernelDtype dtype,
                                   cudaStream_t stream) {
  if (of.rows == 0 || of.features == 0) {
    return cudaSuccess;
  }
  const dim3 blocks(static_cast<unsigned>(cuda::ceil_div(of.features, kThreads)),
                    static_cast<unsigned>(cuda::ceil_div(of.rows, rows_of_term)));
  return with_type(dtype, [&]<class T>() {
    weight_kernel<T><<<blocks, kThreads, 0, stream>>>(of, rows_of_term, static_cast<Computed<T>*>(terms));
  });
}

}  // namespace tessera::fused
