#include "fused/cpu/norm_kernels.h"

#include <cmath>

#include "fused/cpu/lanes.h"

namespace tessera::fused {

namespace {

template <class Vector>
auto sum_of_lanes(const Vector& vector) {
  return at::vec::vec_reduce_all<typename Vector::value_type>([](const Vector& a, const Vector& b) { return a + b; },
                                                              vector);
}

/// Writes x + residual to `sum`.
template <class T>
void add_row(const T* x, const T* residual, T* sum, int64_t features) {
  using Vector = typename Lanes<T>::Vector;
  map_elements<T, 2, 1>({x, residual}, {sum}, features,
                        [](const std::array<Vector, 2>& in) -> std::array<Vector, 1> { return {in[0] + in[1]}; });
}

template <class T>
Accumulated<T> sum_of_squares(const T* x, int64_t features) {
  using Row = Lanes<T>;
  typename Row::Vector squares(0);
  for (int64_t i = 0; i < features; i += Row::kSize) {
    const auto values = Row::load(x + i, features - i);
    for (const auto& vector : values.vectors) {
      squares = at::vec::fmadd(vector, vector, squares);
    }
  }
  return sum_of_lanes(squares);
}

template <class T>
void forward_rows(const NormOperands& of, int64_t begin, int64_t end) {
  using Vector = typename Lanes<T>::Vector;
  const int64_t features = of.features;
  const auto* const weight = static_cast<const T*>(of.weight);
  const Vector offset(static_cast<Accumulated<T>>(of.weight_offset));
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(of.x) + row * features;
    if (of.residual != nullptr) {
      T* const sum = static_cast<T*>(of.sum) + row * features;
      add_row(x, static_cast<const T*>(of.residual) + row * features, sum, features);
      x = sum;  // rounded
    }
    const auto mean = sum_of_squares(x, features) / static_cast<Accumulated<T>>(features);
    const auto rstd = 1 / std::sqrt(mean + static_cast<Accumulated<T>>(of.eps));
    static_cast<Accumulated<T>*>(of.rstd)[row] = rstd;
    const Vector scale(rstd);
    map_elements<T, 2, 1>(
        {x, weight}, {static_cast<T*>(of.normed) + row * features}, features,
        [&](const std::array<Vector, 2>& in) -> std::array<Vector, 1> { return {in[0] * scale * (in[1] + offset)}; });
  }
}

/// Returns the sum of grad * (weight + offset) * x, and adds grad * x * rstd to `grad_weight` unless it is null.
template <class T>
Accumulated<T> reduce_row(const T* grad, const T* x, const T* weight, Accumulated<T> weight_offset, Accumulated<T> rstd,
                          Accumulated<T>* grad_weight, int64_t features) {
  using Row = Lanes<T>;
  using Vector = typename Row::Vector;
  Vector dot(0);
  const Vector offset(weight_offset), scale(rstd);
  for (int64_t i = 0; i < features; i += Row::kSize) {
    const auto grads = Row::load(grad + i, features - i), values = Row::load(x + i, features - i),
               weights = Row::load(weight + i, features - i);
    for (int v = 0; v < Row::kVectors; ++v) {
      const auto product = grads.vectors[v] * values.vectors[v];
      dot = at::vec::fmadd(product, weights.vectors[v] + offset, dot);
      const int64_t at = i + v * Vector::size(), rest = features - at;
      if (grad_weight != nullptr && rest > 0) {
        auto terms = Lanes<Accumulated<T>>::load(grad_weight + at, rest);
        terms.vectors[0] = at::vec::fmadd(product, scale, terms.vectors[0]);
        terms.store(grad_weight + at, rest);
      }
    }
  }
  return sum_of_lanes(dot);
}

template <class T>
void backward_rows(const NormBackwardOperands& of, int64_t begin, int64_t end, void* grad_weight) {
  using Vector = typename Lanes<T>::Vector;
  using Number = Accumulated<T>;
  const int64_t features = of.features;
  const auto* const weight = static_cast<const T*>(of.weight);
  const auto weight_offset = static_cast<Number>(of.weight_offset);
  const Vector offset(weight_offset);
  for (int64_t row = begin; row < end; ++row) {
    const auto of_row = [&](const void* all) { return static_cast<const T*>(all) + row * features; };
    const T *const grad = of_row(of.grad), *const x = of_row(of.x);
    const Number rstd = static_cast<const Number*>(of.rstd)[row];
    const Number dot = reduce_row<T>(grad, x, weight, weight_offset, rstd, static_cast<Number*>(grad_weight), features);
    const Vector scale(rstd), along(dot * rstd * rstd * rstd / static_cast<Number>(features));
    const auto through_norm = [&](const Vector& g, const Vector& value, const Vector& w) {
      return g * (w + offset) * scale - value * along;
    };
    T* const grad_x = static_cast<T*>(of.grad_x) + row * features;
    if (of.grad_sum != nullptr) {
      map_elements<T, 4, 1>({grad, x, weight, of_row(of.grad_sum)}, {grad_x}, features,
                            [&](const std::array<Vector, 4>& in) -> std::array<Vector, 1> {
                              return {through_norm(in[0], in[1], in[2]) + in[3]};
                            });
    } else {
      map_elements<T, 3, 1>({grad, x, weight}, {grad_x}, features,
                            [&](const std::array<Vector, 3>& in) -> std::array<Vector, 1> {
                              return {through_norm(in[0], in[1], in[2])};
                            });
    }
  }
}

void forward(const NormOperands& of, int64_t begin, int64_t end) {
  with_dtype(of.dtype, [&]<class T>(T) { forward_rows<T>(of, begin, end); });
}

void backward(const NormBackwardOperands& of, int64_t begin, int64_t end, void* grad_weight) {
  with_dtype(of.dtype, [&]<class T>(T) { backward_rows<T>(of, begin, end, grad_weight); });
}

}  // namespace

const NormKernels& norm_kernels(ThisSet) {
  static constexpr NormKernels kernels{.forward = forward, .backward = backward};
  return kernels;
}

}  // namespace tessera::fused
