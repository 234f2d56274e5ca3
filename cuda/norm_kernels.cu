#include "cuda/norm_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace tessera::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 1024;

/// Of the block's threads, in thread 0.
template <NormKind kKind, typename Sum>
__device__ Sum combine_block(Sum sum) {
  __shared__ Sum sums[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  sums[thread] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    combine_step<kKind>(sums, half, thread);
    __syncthreads();
  }
  return sums[0];
}

template <typename T, typename Sum, NormKind kKind>
__global__ void __launch_bounds__(kThreads) norm_kernel(const __grid_constant__ NormTable table, Sum* partials) {
  Sum sum = 0;
  for (int64_t tile = blockIdx.x; tile < table.first_tile[table.count]; tile += gridDim.x) {
    sum = combine<kKind>(sum, norm_of_tile<T, Sum, kKind>(table, tile, static_cast<int>(threadIdx.x), kThreads));
  }
  sum = combine_block<kKind>(sum);
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = sum;
  }
}

template <typename Sum, NormKind kKind>
__global__ void __launch_bounds__(kThreads) result_kernel(const Sum* partials, int64_t count, Sum* result) {
  const Sum sum =
      combine_block<kKind>(norm_of_partials<Sum, kKind>(partials, count, static_cast<int>(threadIdx.x), kThreads));
  if (threadIdx.x == 0) {
    *result = sum;
  }
}

/// visit(std::integral_constant of the kind).
template <typename Visit>
cudaError_t with_kind(NormKind kind, Visit visit) {
  switch (kind) {
    case NormKind::L1:
      return visit.template operator()<NormKind::L1>();
    case NormKind::L2:
      return visit.template operator()<NormKind::L2>();
    case NormKind::Inf:
      return visit.template operator()<NormKind::Inf>();
  }
  return cudaErrorInvalidValue;
}

template <typename T, typename Sum>
cudaError_t launch(const NormTable& table, NormKind kind, void* partials, cudaStream_t stream) {
  return with_kind(kind, [&]<NormKind kKind>() {
    norm_kernel<T, Sum, kKind><<<norm_blocks(table.tiles()), kThreads, 0, stream>>>(table, static_cast<Sum*>(partials));
    return cudaGetLastError();
  });
}

template <typename Sum>
cudaError_t launch_result(const void* partials, int64_t count, NormKind kind, void* result, cudaStream_t stream) {
  return with_kind(kind, [&]<NormKind kKind>() {
    result_kernel<Sum, kKind>
        <<<1, kThreads, 0, stream>>>(static_cast<const Sum*>(partials), count, static_cast<Sum*>(result));
    return cudaGetLastError();
  });
}

}  // namespace

int norm_blocks(int64_t tiles) {
  return static_cast<int>(tiles < kMaxBlocks ? tiles : kMaxBlocks);
}

cudaError_t launch_norm(const NormTable& table, NormDtype dtype, NormKind kind, void* partials, cudaStream_t stream) {
  if (table.tiles() == 0) {
    return cudaSuccess;
  }
  switch (dtype) {
    case NormDtype::Float32:
      return launch<float, float>(table, kind, partials, stream);
    case NormDtype::BFloat16:
      return launch<c10::BFloat16, float>(table, kind, partials, stream);
    case NormDtype::Float16:
      return launch<c10::Half, float>(table, kind, partials, stream);
    case NormDtype::Float64:
      return launch<double, double>(table, kind, partials, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_norm_result(const void* partials, int64_t count, NormDtype dtype, NormKind kind, void* result,
                               cudaStream_t stream) {
  return dtype == NormDtype::Float64 ? launch_result<double>(partials, count, kind, result, stream)
                                     : launch_result<float>(partials, count, kind, result, stream);
}

}  // namespace tessera::cuda
