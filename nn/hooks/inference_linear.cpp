#include "nn/hooks/inference_linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

namespace tessera::detail {

namespace {

constexpr int64_t kMaxRows = 16;              // above this, MKL's kernel is as fast
constexpr int64_t kProductsOfThread = 32768;  // minimum per thread, as in ATen

#define TESSERA_INLINE inline __attribute__((always_inline))  // into a function for one instruction set

/// Vectors of one instruction set, used as values like floats.
template <int kLanes>
struct Vectors {
  using Floats [[gnu::vector_size(kLanes * 4), gnu::aligned(4), gnu::may_alias]] = float;
  using Words [[gnu::vector_size(kLanes * 4), gnu::aligned(4), gnu::may_alias]] = uint32_t;
  using Halves [[gnu::vector_size(kLanes * 2), gnu::aligned(2), gnu::may_alias]] = uint16_t;
};

TESSERA_INLINE float to_float(float value) {
  return value;
}

TESSERA_INLINE float to_float(c10::BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.x) << 16);
}

template <int kLanes>
TESSERA_INLINE void load(const float* from, typename Vectors<kLanes>::Floats& to) {
  to = *reinterpret_cast<const typename Vectors<kLanes>::Floats*>(from);
}

template <int kLanes>
TESSERA_INLINE void load(const c10::BFloat16* from, typename Vectors<kLanes>::Floats& to) {
  using V = Vectors<kLanes>;
  const auto halves = *reinterpret_cast<const typename V::Halves*>(from);
  const typename V::Words words = __builtin_convertvector(halves, typename V::Words) << 16;
  std::memcpy(&to, &words, sizeof(to));
}

/// Rows of the input and the weight, and the output.
template <class Weight>
struct Operands {
  const float* input;    // [rows, in]
  const Weight* weight;  // [out, in]
  float* output;         // [rows, out]
  int64_t rows, in, out;
};

/// Computes kRows x kOut products, with sums in registers.
template <int kLanes, int kRows, int kOut, class Weight>
TESSERA_INLINE void multiply_tile(const Operands<Weight>& of, int64_t row, int64_t out) {
  using Floats = typename Vectors<kLanes>::Floats;
  const float* const input = of.input + row * of.in;
  const Weight* const weight = of.weight + out * of.in;
  Floats sums[kOut][kRows] = {};
  int64_t i = 0;
  for (; i + kLanes <= of.in; i += kLanes) {
    Floats weights[kOut];
#pragma GCC unroll 8
    for (int o = 0; o < kOut; ++o) {
      load<kLanes>(weight + o * of.in + i, weights[o]);
      __builtin_prefetch(weight + (o + kOut) * of.in + i, /*write=*/0,
                         /*to L2=*/2);  // the CPU's prefetch ends at pages
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Floats inputs;
      load<kLanes>(input + r * of.in + i, inputs);
#pragma GCC unroll 8
      for (int o = 0; o < kOut; ++o) {
        sums[o][r] += weights[o] * inputs;
      }
    }
  }
  for (int o = 0; o < kOut; ++o) {
    for (int r = 0; r < kRows; ++r) {
      float sum = 0;
      for (int lane = 0; lane < kLanes; ++lane) {
        sum += sums[o][r][lane];
      }
      for (int64_t rest = i; rest < of.in; ++rest) {
        sum += to_float(weight[o * of.in + rest]) * input[r * of.in + rest];
      }
      of.output[(row + r) * of.out + out + o] = sum;
    }
  }
}

/// Computes all rows with kOut rows of the weight, which stay in the cache.
template <int kLanes, int kOut, class Weight>
TESSERA_INLINE void multiply_rows(const Operands<Weight>& of, int64_t out) {
  int64_t row = 0;
  for (; row + 4 <= of.rows; row += 4) {
    multiply_tile<kLanes, 4, kOut>(of, row, out);
  }
  switch (of.rows - row) {
    case 3:
      return multiply_tile<kLanes, 3, kOut>(of, row, out);
    case 2:
      return multiply_tile<kLanes, 2, kOut>(of, row, out);
    case 1:
      return multiply_tile<kLanes, 1, kOut>(of, row, out);
    default:
      return;
  }
}

template <int kLanes, class Weight>
TESSERA_INLINE void multiply(const Operands<Weight>& of, int64_t begin, int64_t end) {
  constexpr int kOut = kLanes == 16 ? 6 : 3;  // 24 sums in 32 registers, 12 in 16
  for (; begin + kOut <= end; begin += kOut) {
    multiply_rows<kLanes, kOut>(of, begin);
  }
  for (; begin < end; ++begin) {
    multiply_rows<kLanes, 1>(of, begin);
  }
}

/// Kernel for rows `begin` to `end` of the weight.
template <class Weight>
using Kernel = void (*)(const Operands<Weight>& of, int64_t begin, int64_t end);

template <class Weight>
void multiply_by_4(const Operands<Weight>& of, int64_t begin, int64_t end) {
  multiply<4>(of, begin, end);
}

#ifdef __x86_64__
template <class Weight>
__attribute__((target("avx2,fma"))) void multiply_by_8(const Operands<Weight>& of, int64_t begin, int64_t end) {
  multiply<8>(of, begin, end);
}

template <class Weight>
__attribute__((target("avx512f,avx512bw,avx512vl"))) void multiply_by_16(const Operands<Weight>& of, int64_t begin,
                                                                         int64_t end) {
  multiply<16>(of, begin, end);
}
#endif

template <class Weight>
Kernel<Weight> kernel_of([[maybe_unused]] int lanes) {
#ifdef __x86_64__
  if (lanes > 4) {
    return lanes == 16 ? multiply_by_16<Weight> : multiply_by_8<Weight>;
  }
#endif
  return multiply_by_4<Weight>;
}

template <class Weight>
void multiply_all(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& output, int lanes) {
  const Kernel<Weight> kernel = kernel_of<Weight>(lanes);
  const Operands<Weight> of{.input = input.const_data_ptr<float>(),
                            .weight = weight.const_data_ptr<Weight>(),
                            .output = output.mutable_data_ptr<float>(),
                            .rows = input.size(0),
                            .in = input.size(1),
                            .out = weight.size(0)};
  const int64_t grain = std::max<int64_t>(1, kProductsOfThread / std::max<int64_t>(1, of.in));
  at::parallel_for(0, of.out, grain, [&](int64_t begin, int64_t end) { kernel(of, begin, end); });
}

bool is_plain(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.key_set().has(c10::DispatchKey::CPU) && tensor.scalar_type() == dtype;
}

bool takes_kernel(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  const auto dtype = weight.scalar_type();
  return c10::InferenceMode::is_enabled() && (dtype == at::kFloat || dtype == at::kBFloat16) &&
         is_plain(weight, dtype) && weight.dim() == 2 && weight.is_contiguous() && is_plain(input, dtype) &&
         input.dim() >= 1 && input.size(-1) == weight.size(1) && input.numel() <= kMaxRows * weight.size(1) &&
         input.numel() > 0 &&
         (!bias.defined() || (is_plain(bias, dtype) && bias.sizes() == weight.sizes().slice(0, 1)));
}

}  // namespace

at::Tensor inference_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  static const int lanes = widest_lanes();
  return takes_kernel(input, weight, bias) ? multiply_few_rows(input, weight, bias, lanes)
                                           : at::linear(input, weight, bias);
}

int widest_lanes() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return 16;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return 8;
  }
#endif
  return 4;
}

at::Tensor multiply_few_rows(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, int lanes) {
  const auto rows = input.to(at::kFloat).reshape({-1, weight.size(1)}).contiguous();
  auto output = at::empty({rows.size(0), weight.size(0)}, rows.options());
  if (weight.scalar_type() == at::kFloat) {
    multiply_all<float>(rows, weight, output, lanes);
  } else {
    multiply_all<c10::BFloat16>(rows, weight, output, lanes);
  }
  if (bias.defined()) {
    output.add_(bias);
  }
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return output.to(weight.scalar_type()).view(sizes);
}

}  // namespace tessera::detail
