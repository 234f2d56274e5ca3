#include "fused/cpu/gate_kernels.h"

#include "fused/cpu/lanes.h"

namespace tessera::fused {

namespace {

template <class Vector>
Vector sigmoid(const Vector& x) {
  return Vector(1) / (Vector(1) + x.neg().exp());
}

template <class T>
void forward_elements(const GateOperands& of, int64_t begin, int64_t end) {
  using Vector = typename Lanes<T>::Vector;
  map_elements<T, 2, 1>({static_cast<const T*>(of.gate) + begin, static_cast<const T*>(of.up) + begin},
                        {static_cast<T*>(of.out) + begin}, end - begin,
                        [](const std::array<Vector, 2>& in) -> std::array<Vector, 1> {
                          const auto& [gate, up] = in;
                          return {gate / (Vector(1) + gate.neg().exp()) * up};
                        });
}

template <class T>
void backward_elements(const GateOperands& of, int64_t begin, int64_t end) {
  using Vector = typename Lanes<T>::Vector;
  map_elements<T, 3, 2>({static_cast<const T*>(of.grad) + begin, static_cast<const T*>(of.gate) + begin,
                         static_cast<const T*>(of.up) + begin},
                        {static_cast<T*>(of.grad_gate) + begin, static_cast<T*>(of.grad_up) + begin}, end - begin,
                        [](const std::array<Vector, 3>& in) -> std::array<Vector, 2> {
                          const auto& [grad, gate, up] = in;
                          const auto slope = sigmoid(gate);
                          const auto silu = gate * slope;
                          return {grad * up * (slope + silu * (Vector(1) - slope)), grad * silu};
                        });
}

void forward(const GateOperands& of, int64_t begin, int64_t end) {
  with_dtype(of.dtype, [&]<class T>(T) { forward_elements<T>(of, begin, end); });
}

void backward(const GateOperands& of, int64_t begin, int64_t end) {
  with_dtype(of.dtype, [&]<class T>(T) { backward_elements<T>(of, begin, end); });
}

}  // namespace

const GateKernels& gate_kernels(ThisSet) {
  static constexpr GateKernels kernels{.forward = forward, .backward = backward};
  return kernels;
}

}  // namespace tessera::fused
