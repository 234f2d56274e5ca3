#pragma once
// SwiGLU, silu(gate) * up, in one pass over memory forward and one backward.
//
//   at::Tensor hidden = swiglu(gate_proj(x), up_proj(x));
//
// ATen's ops read and write silu(gate) apart, and keep it for backward; this keeps its operands alone.
// Source: N. Shazeer, GLU Variants Improve Transformer, 2020. Thread safety: any thread.

#include <ATen/core/Tensor.h>

namespace tessera {

/// Returns silu(gate) * up, rounded once. Operands may be DTensors, of any placements: those of the result are as for
/// ATen's ops. Operands that differ in sizes or dtype, and dtypes that do not float, are left to ATen's ops. A backward
/// with create_graph uses these too.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace tessera
