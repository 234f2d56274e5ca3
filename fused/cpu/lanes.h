#pragma once
// Vectors of any floating-point dtype for kernels, which compute in that dtype, or in float32 for 16 bits.
//
// The last elements of a row are computed as parts of full vectors, so that results do not depend on where rows are
// split. For sources that are compiled for each instruction set.

#include <ATen/cpu/vec/functional.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <type_traits>

namespace tessera::fused {

template <class T>
using Accumulated = at::vec::vec_scalar_t<T>;  // float for 16 bits

/// Elements of one register.
template <class T>
struct Lanes {
  using Vector = at::vec::Vectorized<Accumulated<T>>;
  static constexpr int64_t kSize = at::vec::Vectorized<T>::size();
  static constexpr int kVectors = static_cast<int>(kSize / Vector::size());

  std::array<Vector, kVectors> vectors;

  /// Loads min(count, kSize) elements, followed by zeros.
  static Lanes load(const T* from, int64_t count) {
    const auto loaded = count >= kSize ? at::vec::Vectorized<T>::loadu(from)
                                       : at::vec::Vectorized<T>::loadu(from, static_cast<int>(count));
    if constexpr (kVectors == 2) {
      const auto [first, second] = at::vec::convert_to_float<T>(loaded);
      return {{first, second}};
    } else {
      return {{loaded}};
    }
  }

  void store(T* to, int64_t count) const {
    at::vec::Vectorized<T> stored;
    if constexpr (kVectors == 2) {
      stored = at::vec::convert_from_float<T>(vectors[0], vectors[1]);
    } else {
      stored = vectors[0];
    }
    if (count >= kSize) {
      stored.store(to);
    } else {
      stored.store(to, static_cast<int>(count));
    }
  }
};

/// Writes the result of op, applied to vectors of `in`, to `out`.
template <class T, size_t kIn, size_t kOut, class Op>
void map_elements(const std::array<const T*, kIn>& in, const std::array<T*, kOut>& out, int64_t count, Op op) {
  using Vector = typename Lanes<T>::Vector;
  for (int64_t i = 0; i < count; i += Lanes<T>::kSize) {
    std::array<Lanes<T>, kIn> inputs;
    std::array<Lanes<T>, kOut> outputs;
    for (size_t j = 0; j < kIn; ++j) {
      inputs[j] = Lanes<T>::load(in[j] + i, count - i);
    }
    for (int v = 0; v < Lanes<T>::kVectors; ++v) {
      std::array<Vector, kIn> operands;
      for (size_t j = 0; j < kIn; ++j) {
        operands[j] = inputs[j].vectors[v];
      }
      const std::array<Vector, kOut> results = op(operands);
      for (size_t j = 0; j < kOut; ++j) {
        outputs[j].vectors[v] = results[j];
      }
    }
    for (size_t j = 0; j < kOut; ++j) {
      outputs[j].store(out[j] + i, count - i);
    }
  }
}

/// Calls visit(T()) for a dtype that takes_kernels() accepts.
template <class Visit>
void with_dtype(at::ScalarType dtype, Visit visit) {
  switch (dtype) {
    case at::ScalarType::Float:
      return visit(float());
    case at::ScalarType::Double:
      return visit(double());
    case at::ScalarType::BFloat16:
      return visit(c10::BFloat16());
    case at::ScalarType::Half:
      return visit(c10::Half());
    default:
      return;
  }
}

}  // namespace tessera::fused
