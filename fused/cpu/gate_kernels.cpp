#include "fused/cpu/gate_kernels.h"

#include <numbers>

#include "fused/cpu/lanes.h"

namespace tessera::fused {

namespace {

template <class Vector>
struct ValueAndSlope {
  Vector value, slope;
};

template <class Vector>
Vector sigmoid(const Vector& x) {
  return Vector(1) / (Vector(1) + x.neg().exp());
}

struct Silu {
  template <class Vector>
  static Vector value(const Vector& x) {
    return x / (Vector(1) + x.neg().exp());
  }
  template <class Vector>
  static ValueAndSlope<Vector> value_and_slope(const Vector& x) {
    const auto gate = sigmoid(x);
    const auto silu = x * gate;
    return {silu, gate + silu * (Vector(1) - gate)};
  }
};

/// x / 2 * (1 + tanh(t)) = x * sigmoid(2 * t), where 2 * t = x * (kLinear + kCubic * x^2).
struct TanhGelu {
  static constexpr double kLinear = 2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi, kCubic = kLinear * 0.044715;

  template <class Vector>
  static Vector number(double value) {
    return Vector(static_cast<typename Vector::value_type>(value));
  }
  template <class Vector>
  static Vector value(const Vector& x) {
    const auto twice = x * (number<Vector>(kLinear) + number<Vector>(kCubic) * (x * x));
    return x / (Vector(1) + twice.neg().exp());
  }
  template <class Vector>
  static ValueAndSlope<Vector> value_and_slope(const Vector& x) {
    const auto square = x * x;
    const auto gate = sigmoid(x * (number<Vector>(kLinear) + number<Vector>(kCubic) * square));
    const auto gelu = x * gate;
    return {gelu, gate + gelu * (Vector(1) - gate) * (number<Vector>(kLinear) + number<Vector>(3 * kCubic) * square)};
  }
};

template <class Activation, class T>
void forward_elements(const GateOperands& of, int64_t begin, int64_t end) {
  using Vector = typename Lanes<T>::Vector;
  map_elements<T, 2, 1>(
      {static_cast<const T*>(of.gate) + begin, static_cast<const T*>(of.up) + begin}, {static_cast<T*>(of.out) + begin},
      end - begin,
      [](const std::array<Vector, 2>& in) -> std::array<Vector, 1> { return {Activation::value(in[0]) * in[1]}; });
}

template <class Activation, class T>
void backward_elements(const GateOperands& of, int64_t begin, int64_t end) {
  using Vector = typename Lanes<T>::Vector;
  map_elements<T, 3, 2>({static_cast<const T*>(of.grad) + begin, static_cast<const T*>(of.gate) + begin,
                         static_cast<const T*>(of.up) + begin},
                        {static_cast<T*>(of.grad_gate) + begin, static_cast<T*>(of.grad_up) + begin}, end - begin,
                        [](const std::array<Vector, 3>& in) -> std::array<Vector, 2> {
                          const auto [value, slope] = Activation::value_and_slope(in[1]);
                          return {in[0] * in[2] * slope, in[0] * value};
                        });
}

template <class Activation, class T>
void activate_elements(const GateOperands& of, int64_t begin, int64_t end) {
  using Vector = typename Lanes<T>::Vector;
  map_elements<T, 1, 1>(
      {static_cast<const T*>(of.gate) + begin}, {static_cast<T*>(of.out) + begin}, end - begin,
      [](const std::array<Vector, 1>& in) -> std::array<Vector, 1> { return {Activation::value(in[0])}; });
}

template <class Activation, class T>
void activate_backward_elements(const GateOperands& of, int64_t begin, int64_t end) {
  using Vector = typename Lanes<T>::Vector;
  map_elements<T, 2, 1>({static_cast<const T*>(of.grad) + begin, static_cast<const T*>(of.gate) + begin},
                        {static_cast<T*>(of.grad_gate) + begin}, end - begin,
                        [](const std::array<Vector, 2>& in) -> std::array<Vector, 1> {
                          return {in[0] * Activation::value_and_slope(in[1]).slope};
                        });
}

/// Calls visit(T(), activation) with the types of both.
template <class Visit>
void with_types(const GateOperands& of, Visit visit) {
  with_dtype(of.dtype, [&]<class T>(T number) {
    if (of.activation == Activated::Silu) {
      visit(number, Silu());
    } else {
      visit(number, TanhGelu());
    }
  });
}

void forward(const GateOperands& of, int64_t begin, int64_t end) {
  with_types(of, [&]<class T, class Activation>(T, Activation) { forward_elements<Activation, T>(of, begin, end); });
}

void backward(const GateOperands& of, int64_t begin, int64_t end) {
  with_types(of, [&]<class T, class Activation>(T, Activation) { backward_elements<Activation, T>(of, begin, end); });
}

void activate(const GateOperands& of, int64_t begin, int64_t end) {
  with_types(of, [&]<class T, class Activation>(T, Activation) { activate_elements<Activation, T>(of, begin, end); });
}

void activate_backward(const GateOperands& of, int64_t begin, int64_t end) {
  with_types(
      of, [&]<class T, class Activation>(T, Activation) { activate_backward_elements<Activation, T>(of, begin, end); });
}

}  // namespace

const GateKernels& gate_kernels(ThisSet) {
  static constexpr GateKernels kernels{
      .forward = forward, .backward = backward, .activate = activate, .activate_backward = activate_backward};
  return kernels;
}

}  // namespace tessera::fused
