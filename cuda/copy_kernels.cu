#include "cuda/copy_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace tessera::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 16;

template <typename To, typename From>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyTable table) {
  for (int64_t tile = blockIdx.x; tile < table.first_tile[table.count]; tile += gridDim.x) {
    copy_table_tile<To, From>(table, tile, static_cast<int>(threadIdx.x), kThreads);
  }
}

template <typename To, typename From>
cudaError_t launch(const CopyTable& table, cudaStream_t stream) {
  const int64_t tiles = table.tiles();
  if (tiles == 0) {
    return cudaSuccess;
  }
  const auto blocks = static_cast<unsigned>(tiles < kMaxBlocks ? tiles : kMaxBlocks);
  copy_kernel<To, From><<<blocks, kThreads, 0, stream>>>(table);
  return cudaGetLastError();
}

template <typename To>
cudaError_t launch_cast(const CopyTable& table, CopyDtype from, cudaStream_t stream) {
  switch (from) {
    case CopyDtype::Float32:
      return launch<To, float>(table, stream);
    case CopyDtype::BFloat16:
      return launch<To, c10::BFloat16>(table, stream);
    case CopyDtype::Float16:
      return launch<To, c10::Half>(table, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_copies(const CopyTable& table, CopyDtype to, CopyDtype from, cudaStream_t stream) {
  switch (to) {
    case CopyDtype::Bits8:
      return launch<uint8_t, uint8_t>(table, stream);
    case CopyDtype::Bits16:
      return launch<uint16_t, uint16_t>(table, stream);
    case CopyDtype::Bits32:
      return launch<uint32_t, uint32_t>(table, stream);
    case CopyDtype::Bits64:
      return launch<uint64_t, uint64_t>(table, stream);
    case CopyDtype::Float32:
      return launch_cast<float>(table, from, stream);
    case CopyDtype::BFloat16:
      return launch_cast<c10::BFloat16>(table, from, stream);
    case CopyDtype::Float16:
      return launch_cast<c10::Half>(table, from, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace tessera::cuda
