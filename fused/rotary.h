#pragma once
// Rotary positions in one pass over memory forward and one backward.
//
//   query = rotate_positions(query, cos, sin);     // [batch, heads, length, head_dim], tables [length, head_dim]
//
// ATen's ops make three tensors of the operand's size on the way. Backward rotates back and keeps nothing but the
// tables. Source: J. Su et al., RoFormer, 2021. Thread safety: any thread.

#include <ATen/core/Tensor.h>

namespace tessera {

/// Rotates the first features of `x` [batch, heads, length, head_dim], as many as the tables have, by pairs (i, i +
/// half of them): x * cos + rotated * sin, where `rotated` is (-second half, first half). Tables are [length, features]
/// or [batch, 1, length, features], and their halves of the last dim are equal. The result has the strides of x where
/// these are dense.
///
/// Operands may be DTensors; shards of batch, heads and length stay, if tables have theirs. Tables that need a gradient
/// or are of another dtype, other sizes, and dtypes that do not float, are left to ATen's ops. A backward with
/// create_graph is this op again.
at::Tensor rotate_positions(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

}  // namespace tessera
