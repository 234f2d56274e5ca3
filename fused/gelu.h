#pragma once
// GELU with tanh on the CPU, faster than ATen's by exp in place of tanh.
//
//   at::Tensor hidden = tanh_gelu(mlp_in(x));
//
// Thread safety: any thread.

#include <ATen/core/Tensor.h>

namespace tessera {

/// Returns gelu(x, "tanh"), rounded once: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)). x may be a DTensor,
/// whose shards stay. Tensors of other devices than the CPU are left to ATen's op, which is as fast there, and so are
/// dtypes that do not float. A backward with create_graph uses it too.
at::Tensor tanh_gelu(const at::Tensor& x);

}  // namespace tessera
