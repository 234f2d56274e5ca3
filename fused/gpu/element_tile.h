#pragma once
// Work of one thread for an elementwise op on one dtype, forward or backward. For the CPU and the GPU.
//
// Threads alternate between accesses of 16 bytes if all tensors are aligned to them, otherwise between elements.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/strided_copy.h"

namespace tessera::fused {

/// Dtype in which kernels compute.
template <class T>
using Computed = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// Contiguous tensors of `count` elements.
template <int kIn, int kOut>
struct ElementOperands {
  const void* in[kIn];
  void* out[kOut];
  int64_t count;

  bool is_aligned() const {
    bool result = true;
    for (const void* address : in) {
      result = result && reinterpret_cast<uintptr_t>(address) % cuda::kAccessBytes == 0;
    }
    for (const void* address : out) {
      result = result && reinterpret_cast<uintptr_t>(address) % cuda::kAccessBytes == 0;
    }
    return result;
  }
};

/// silu(gate) * up of {gate, up}.
struct SwigluForward {
  static constexpr int kIn = 2, kOut = 1;
  template <class C>
  static TESSERA_HOST_DEVICE void compute(const C* in, C* out) {
    out[0] = in[0] / (1 + std::exp(-in[0])) * in[1];
  }
};

/// Gradients of {gate, up}, from {gradient, gate, up}.
struct SwigluBackward {
  static constexpr int kIn = 3, kOut = 2;
  template <class C>
  static TESSERA_HOST_DEVICE void compute(const C* in, C* out) {
    const C slope = 1 / (1 + std::exp(-in[1]));
    const C silu = in[1] * slope;
    out[0] = in[0] * in[2] * (slope + silu * (1 - slope));
    out[1] = in[0] * silu;
  }
};

/// gelu(gate, "tanh") * up of {gate, up}, as fused/cpu/gate_kernels.cpp explains.
struct TanhGegluForward {
  static constexpr int kIn = 2, kOut = 1;
  static constexpr double kLinear = 1.5957691216057308, kCubic = kLinear * 0.044715;
  template <class C>
  static TESSERA_HOST_DEVICE void compute(const C* in, C* out) {
    const C twice = in[0] * (static_cast<C>(kLinear) + static_cast<C>(kCubic) * in[0] * in[0]);
    out[0] = in[0] / (1 + std::exp(-twice)) * in[1];
  }
};

/// Gradients of {gate, up}, of {the gradient, gate, up}.
struct TanhGegluBackward {
  static constexpr int kIn = 3, kOut = 2;
  static constexpr double kLinear = TanhGegluForward::kLinear, kCubic = TanhGegluForward::kCubic;
  template <class C>
  static TESSERA_HOST_DEVICE void compute(const C* in, C* out) {
    const C square = in[1] * in[1];
    const C slope = 1 / (1 + std::exp(-in[1] * (static_cast<C>(kLinear) + static_cast<C>(kCubic) * square)));
    const C gelu = in[1] * slope;
    const C of_gate = slope + gelu * (1 - slope) * (static_cast<C>(kLinear) + static_cast<C>(3 * kCubic) * square);
    out[0] = in[0] * in[2] * of_gate;
    out[1] = in[0] * gelu;
  }
};

/// Computes kWide elements from element `first`.
template <class Op, class T, int kWide>
TESSERA_HOST_DEVICE void compute_access(const ElementOperands<Op::kIn, Op::kOut>& of, int64_t first) {
  using Access = cuda::Pack<T, kWide>;
  Access in[Op::kIn], out[Op::kOut];
  for (int j = 0; j < Op::kIn; ++j) {
    in[j] = *reinterpret_cast<const Access*>(static_cast<const T*>(of.in[j]) + first);
  }
  for (int i = 0; i < kWide; ++i) {
    Computed<T> operands[Op::kIn], results[Op::kOut];
    for (int j = 0; j < Op::kIn; ++j) {
      operands[j] = static_cast<Computed<T>>(in[j].items[i]);
    }
    Op::compute(operands, results);
    for (int j = 0; j < Op::kOut; ++j) {
      out[j].items[i] = static_cast<T>(results[j]);
    }
  }
  for (int j = 0; j < Op::kOut; ++j) {
    *reinterpret_cast<Access*>(static_cast<T*>(of.out[j]) + first) = out[j];
  }
}

/// Computes the share of thread `thread` of `threads`.
template <class Op, class T>
TESSERA_HOST_DEVICE void compute_elements(const ElementOperands<Op::kIn, Op::kOut>& of, bool is_aligned, int64_t thread,
                                          int64_t threads) {
  constexpr int kWide = cuda::kAccessBytes / static_cast<int>(sizeof(T));
  const int64_t accesses = is_aligned ? of.count / kWide : 0;
  for (int64_t access = thread; access < accesses; access += threads) {
    compute_access<Op, T, kWide>(of, access * kWide);
  }
  for (int64_t i = accesses * kWide + thread; i < of.count; i += threads) {
    compute_access<Op, T, 1>(of, i);
  }
}

}  // namespace tessera::fused
