#pragma once
// Rotary positions of rows on the CPU.

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "fused/cpu/instruction_set.h"
#include "fused/cpu/rotary_rows.h"

namespace tessera::fused {

struct RotaryKernels {
  /// Rotates rows `begin` to `end`, counted through all dims.
  void (*rotate)(const RotaryRows& of, at::ScalarType dtype, int64_t begin, int64_t end);
};

const RotaryKernels& rotary_kernels(Baseline);
const RotaryKernels& rotary_kernels(Avx2);
const RotaryKernels& rotary_kernels(Avx512);

}  // namespace tessera::fused
