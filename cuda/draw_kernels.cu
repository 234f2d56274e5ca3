#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <curand_kernel.h>

#include "cuda/draw_kernels.h"

namespace tessera::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;

__device__ curandStatePhilox4_32_10_t state_at(uint64_t seed, const DrawPlace& place) {
  curandStatePhilox4_32_10_t state;
  curand_init(seed, place.sequence, place.offset, &state);
  return state;
}

// Not by address: the numbers stay in registers.
__device__ float select_lane(const float4& numbers, int lane) {
  const float low = lane == 0 ? numbers.x : numbers.y, high = lane == 2 ? numbers.z : numbers.w;
  return lane < 2 ? low : high;
}
__device__ double select_lane(const double2& numbers, int lane) {
  return lane == 0 ? numbers.x : numbers.y;
}

template <typename Number>
struct DrawNormal {
  __device__ Number operator()(uint64_t seed, const DrawPlace& place) const {
    auto state = state_at(seed, place);
    if constexpr (sizeof(Number) == sizeof(double)) {
      return select_lane(curand_normal2_double(&state), place.lane);
    } else {
      return select_lane(curand_normal4(&state), place.lane);
    }
  }
};

template <typename Number>
struct DrawUniform {
  __device__ Number operator()(uint64_t seed, const DrawPlace& place) const {
    auto state = state_at(seed, place);
    if constexpr (sizeof(Number) == sizeof(double)) {
      return select_lane(curand_uniform2_double(&state), place.lane);
    } else {
      return select_lane(curand_uniform4(&state), place.lane);
    }
  }
};

template <typename T, typename Draw, typename Item>
__global__ void __launch_bounds__(kThreads) draw_kernel(const __grid_constant__ DrawTable table, T* local, Item item) {
  draw_elements(table, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads, local, Draw(),
                item);
}

template <typename T, typename Draw, typename Item>
cudaError_t launch(const DrawTable& table, void* local, const Item& item, cudaStream_t stream) {
  const int64_t blocks = ceil_div(table.numel, kThreads);
  draw_kernel<T, Draw, Item><<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0, stream>>>(
      table, static_cast<T*>(local), item);
  return cudaGetLastError();
}

template <typename T, typename Number>
cudaError_t launch_dtype(const DrawTable& table, const DrawParameters& parameters, void* local, cudaStream_t stream) {
  const auto [distribution, a, b] = parameters;
  if (distribution == Distribution::Bernoulli) {
    return launch<T, DrawUniform<Number>>(table, local, BernoulliItem<T, Number>{static_cast<Number>(a)}, stream);
  }
  if constexpr (std::is_same_v<T, bool>) {
    return cudaErrorInvalidValue;
  } else if (distribution == Distribution::Normal) {
    const NormalItem<T, Number> item{static_cast<Number>(a), static_cast<Number>(b)};
    return launch<T, DrawNormal<Number>>(table, local, item, stream);
  } else {
    const T from = static_cast<T>(a), to = static_cast<T>(b);
    return launch<T, DrawUniform<Number>>(table, local,
                                          UniformItem<T, Number>{from, to, static_cast<Number>(to - from)}, stream);
  }
}

}  // namespace

int draw_width(DrawDtype dtype) {
  return dtype == DrawDtype::Float64 ? 2 : 4;
}

cudaError_t launch_draw(const DrawTable& table, DrawDtype dtype, const DrawParameters& parameters, void* local,
                        cudaStream_t stream) {
  if (table.numel == 0) {
    return cudaSuccess;
  }
  switch (dtype) {
    case DrawDtype::Float32:
      return launch_dtype<float, float>(table, parameters, local, stream);
    case DrawDtype::BFloat16:
      return launch_dtype<c10::BFloat16, float>(table, parameters, local, stream);
    case DrawDtype::Float16:
      return launch_dtype<c10::Half, float>(table, parameters, local, stream);
    case DrawDtype::Float64:
      return launch_dtype<double, double>(table, parameters, local, stream);
    case DrawDtype::Bool:
      return launch_dtype<bool, float>(table, parameters, local, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace tessera::cuda
