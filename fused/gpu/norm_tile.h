#pragma once
// Work of one thread of a block for a row's normalization (fused/rms_norm.h), forward and backward. For the CPU and the
// GPU.
//
// A block processes a row. Its threads return terms of a sum, which the block adds up, and then write their elements of
// the row. The weight's gradient has one term per group of rows, of which a thread computes one column.

#include <cmath>
#include <cstdint>

#include "fused/gpu/element_tile.h"

namespace tessera::fused {

/// Operands, named as in fused/cpu/norm_kernels.h.
struct NormRows {
  int64_t rows, features;
  double eps, weight_offset;
  const void *x, *residual, *weight;
  void *sum, *normed, *rstd;
  bool is_aligned;  // whether all rows are aligned to accesses
};

struct NormGradientRows {
  int64_t rows, features;
  double weight_offset;
  const void *grad, *grad_sum, *x, *weight, *rstd;
  void* grad_x;
  bool is_aligned;
};

template <class T>
TESSERA_HOST_DEVICE const T* norm_row(const void* all, int64_t row, int64_t features) {
  return static_cast<const T*>(all) + row * features;
}

template <class T>
TESSERA_HOST_DEVICE T* norm_row(void* all, int64_t row, int64_t features) {
  return static_cast<T*>(all) + row * features;
}

/// kWide elements, converted for computation.
template <class T, int kWide>
struct Numbers {
  Computed<T> items[kWide];

  TESSERA_HOST_DEVICE static Numbers load(const T* from) {
    const auto pack = *reinterpret_cast<const cuda::Pack<T, kWide>*>(from);
    Numbers numbers;
    for (int i = 0; i < kWide; ++i) {
      numbers.items[i] = static_cast<Computed<T>>(pack.items[i]);
    }
    return numbers;
  }
  TESSERA_HOST_DEVICE void store(T* to) const {
    cuda::Pack<T, kWide> pack;
    for (int i = 0; i < kWide; ++i) {
      pack.items[i] = static_cast<T>(items[i]);
    }
    *reinterpret_cast<cuda::Pack<T, kWide>*>(to) = pack;
  }
};

/// Adds the residual to elements from `first` on, and returns the sum of squares.
template <class T, int kWide>
TESSERA_HOST_DEVICE Computed<T> square_elements(const NormRows& of, int64_t row, int64_t first) {
  auto values = Numbers<T, kWide>::load(norm_row<T>(of.x, row, of.features) + first);
  if (of.residual != nullptr) {
    const auto more = Numbers<T, kWide>::load(norm_row<T>(of.residual, row, of.features) + first);
    for (int i = 0; i < kWide; ++i) {
      values.items[i] += more.items[i];
    }
    T* const sum = norm_row<T>(of.sum, row, of.features) + first;
    values.store(sum);
    values = Numbers<T, kWide>::load(sum);  // rounded values
  }
  Computed<T> squares = 0;
  for (int i = 0; i < kWide; ++i) {
    squares += values.items[i] * values.items[i];
  }
  return squares;
}

template <class T, int kWide>
TESSERA_HOST_DEVICE int normalize_elements(const NormRows& of, int64_t row, int64_t first, Computed<T> rstd) {
  const void* const x = of.residual != nullptr ? of.sum : of.x;
  auto values = Numbers<T, kWide>::load(norm_row<T>(x, row, of.features) + first);
  const auto weights = Numbers<T, kWide>::load(static_cast<const T*>(of.weight) + first);
  const auto offset = static_cast<Computed<T>>(of.weight_offset);
  for (int i = 0; i < kWide; ++i) {
    values.items[i] = values.items[i] * rstd * (weights.items[i] + offset);
  }
  values.store(norm_row<T>(of.normed, row, of.features) + first);
  return 0;
}

/// Returns the sum of grad * (weight + offset) * x.
template <class T, int kWide>
TESSERA_HOST_DEVICE Computed<T> multiply_elements(const NormGradientRows& of, int64_t row, int64_t first) {
  const auto grads = Numbers<T, kWide>::load(norm_row<T>(of.grad, row, of.features) + first);
  const auto values = Numbers<T, kWide>::load(norm_row<T>(of.x, row, of.features) + first);
  const auto weights = Numbers<T, kWide>::load(static_cast<const T*>(of.weight) + first);
  const auto offset = static_cast<Computed<T>>(of.weight_offset);
  Computed<T> dot = 0;
  for (int i = 0; i < kWide; ++i) {
    dot += grads.items[i] * (weights.items[i] + offset) * values.items[i];
  }
  return dot;
}

template <class T, int kWide>
TESSERA_HOST_DEVICE int differentiate_elements(const NormGradientRows& of, int64_t row, int64_t first,
                                               Computed<T> dot) {
  auto grads = Numbers<T, kWide>::load(norm_row<T>(of.grad, row, of.features) + first);
  const auto values = Numbers<T, kWide>::load(norm_row<T>(of.x, row, of.features) + first);
  const auto weights = Numbers<T, kWide>::load(static_cast<const T*>(of.weight) + first);
  const auto offset = static_cast<Computed<T>>(of.weight_offset);
  const Computed<T> rstd = static_cast<const Computed<T>*>(of.rstd)[row];
  const Computed<T> along = dot * rstd * rstd * rstd / static_cast<Computed<T>>(of.features);
  for (int i = 0; i < kWide; ++i) {
    grads.items[i] = grads.items[i] * (weights.items[i] + offset) * rstd - values.items[i] * along;
  }
  if (of.grad_sum != nullptr) {
    const auto more = Numbers<T, kWide>::load(norm_row<T>(of.grad_sum, row, of.features) + first);
    for (int i = 0; i < kWide; ++i) {
      grads.items[i] += more.items[i];
    }
  }
  grads.store(norm_row<T>(of.grad_x, row, of.features) + first);
  return 0;
}

/// Calls wide(first element) or narrow(first element) for the accesses of thread `thread` of `threads`, and returns the
/// sum of the results.
template <class T, class Sum, class Wide, class Narrow>
TESSERA_HOST_DEVICE Sum visit_accesses(int64_t features, bool is_aligned, int thread, int threads, Wide wide,
                                       Narrow narrow) {
  constexpr int kWide = cuda::kAccessBytes / static_cast<int>(sizeof(T));
  const int64_t accesses = is_aligned ? features / kWide : 0;
  Sum sum = 0;
  for (int64_t access = thread; access < accesses; access += threads) {
    sum += wide(access * kWide);
  }
  for (int64_t i = accesses * kWide + thread; i < features; i += threads) {
    sum += narrow(i);
  }
  return sum;
}

/// Returns the thread's term of the row's sum of squares.
template <class T>
TESSERA_HOST_DEVICE Computed<T> squares_of_thread(const NormRows& of, int64_t row, int thread, int threads) {
  constexpr int kWide = cuda::kAccessBytes / static_cast<int>(sizeof(T));
  return visit_accesses<T, Computed<T>>(
      of.features, of.is_aligned, thread, threads,
      [&](int64_t first) { return square_elements<T, kWide>(of, row, first); },
      [&](int64_t first) { return square_elements<T, 1>(of, row, first); });
}

/// Writes the thread's elements. `squares` is the row's sum.
template <class T>
TESSERA_HOST_DEVICE void normalize_by_thread(const NormRows& of, int64_t row, Computed<T> squares, int thread,
                                             int threads) {
  constexpr int kWide = cuda::kAccessBytes / static_cast<int>(sizeof(T));
  const Computed<T> mean = squares / static_cast<Computed<T>>(of.features);
  const Computed<T> rstd = 1 / std::sqrt(mean + static_cast<Computed<T>>(of.eps));
  if (thread == 0) {
    static_cast<Computed<T>*>(of.rstd)[row] = rstd;
  }
  visit_accesses<T, int>(
      of.features, of.is_aligned, thread, threads,
      [&](int64_t first) { return normalize_elements<T, kWide>(of, row, first, rstd); },
      [&](int64_t first) { return normalize_elements<T, 1>(of, row, first, rstd); });
}

/// Returns the thread's term of the row's sum of grad * (weight + offset) * x.
template <class T>
TESSERA_HOST_DEVICE Computed<T> dot_of_thread(const NormGradientRows& of, int64_t row, int thread, int threads) {
  constexpr int kWide = cuda::kAccessBytes / static_cast<int>(sizeof(T));
  return visit_accesses<T, Computed<T>>(
      of.features, of.is_aligned, thread, threads,
      [&](int64_t first) { return multiply_elements<T, kWide>(of, row, first); },
      [&](int64_t first) { return multiply_elements<T, 1>(of, row, first); });
}

/// Writes the thread's elements of the row's gradient.
template <class T>
TESSERA_HOST_DEVICE void differentiate_by_thread(const NormGradientRows& of, int64_t row, Computed<T> dot, int thread,
                                                 int threads) {
  constexpr int kWide = cuda::kAccessBytes / static_cast<int>(sizeof(T));
  visit_accesses<T, int>(
      of.features, of.is_aligned, thread, threads,
      [&](int64_t first) { return differentiate_elements<T, kWide>(of, row, first, dot); },
      [&](int64_t first) { return differentiate_elements<T, 1>(of, row, first, dot); });
}

/// Returns the part of rows `begin` to `end` of the weight's gradient in column `column`.
template <class T>
TESSERA_HOST_DEVICE Computed<T> weight_gradient(const NormGradientRows& of, int64_t begin, int64_t end,
                                                int64_t column) {
  Computed<T> sum = 0;
  for (int64_t row = begin; row < end; ++row) {
    sum += static_cast<Computed<T>>(norm_row<T>(of.grad, row, of.features)[column]) *
           static_cast<Computed<T>>(norm_row<T>(of.x, row, of.features)[column]) *
           static_cast<const Computed<T>*>(of.rstd)[row];
  }
  return sum;
}

}  // namespace tessera::fused
