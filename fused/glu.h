#pragma once
// Gated linear units with one pass over memory in forward and one in backward.
//
//   at::Tensor hidden = swiglu(gate_proj(x), up_proj(x));         // silu(gate) * up
//
// ATen's ops read and write the activated gate separately, and keep it for backward; these ops keep only their
// operands. Source: N. Shazeer, GLU Variants Improve Transformer, 2020. Thread safety: any thread.

#include <ATen/core/Tensor.h>

namespace tessera {

/// Returns silu(gate) * up, rounded once. Operands may be DTensors with any placements; the result is placed as by
/// ATen's ops. ATen's ops handle operands of different sizes or dtypes, dtypes that are not floating-point, and a
/// backward with create_graph.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// Returns gelu(gate, "tanh") * up in the same way.
at::Tensor tanh_geglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace tessera
