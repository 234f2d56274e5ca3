#pragma once
// Activations of contiguous elements on the CPU, gated or not, with one pass over memory in forward and one in
// backward.

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "fused/cpu/instruction_set.h"

namespace tessera::fused {

enum class Activated { Silu, TanhGelu };

/// Elements of one dtype; operands that a kernel does not need are null.
struct GateOperands {
  at::ScalarType dtype;
  Activated activation;
  const void* grad;
  const void* gate;
  const void* up;
  void* out;
  void* grad_gate;
  void* grad_up;
};

/// Kernels, each of which computes elements `begin` to `end`.
struct GateKernels {
  using Kernel = void (*)(const GateOperands& of, int64_t begin, int64_t end);

  Kernel forward;            // activation(gate) * up
  Kernel backward;           // gradients of both
  Kernel activate;           // activation(gate)
  Kernel activate_backward;  // its gradient
};

const GateKernels& gate_kernels(Baseline);
const GateKernels& gate_kernels(Avx2);
const GateKernels& gate_kernels(Avx512);

}  // namespace tessera::fused
