#pragma once
// Gated activations of contiguous elements on the CPU, with one pass over memory in forward and one in backward.

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "fused/cpu/instruction_set.h"

namespace tessera::fused {

/// Elements of one dtype; operands that a kernel does not need are null.
struct GateOperands {
  at::ScalarType dtype;
  const void* grad;
  const void* gate;
  const void* up;
  void* out;
  void* grad_gate;
  void* grad_up;
};

/// Kernels, each of which computes elements `begin` to `end`.
struct GateKernels {
  void (*forward)(const GateOperands& of, int64_t begin, int64_t end);
  void (*backward)(const GateOperands& of, int64_t begin, int64_t end);
};

const GateKernels& gate_kernels(Baseline);
const GateKernels& gate_kernels(Avx2);
const GateKernels& gate_kernels(Avx512);

}  // namespace tessera::fused
