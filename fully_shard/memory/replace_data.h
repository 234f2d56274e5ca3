#pragma once
// What set_data does, without what it checks.

#include <ATen/core/Tensor.h>

namespace tessera {

/// `tensor` becomes `data` and stays the same object, for all who refer to it. Between any types and devices: where
/// set_data goes through the dispatcher and the DTensor fallback to compare them, at seven times the cost of the rest.
/// As there, the tensor gets a new node to accumulate its gradient.
void replace_data(const at::Tensor& tensor, const at::Tensor& data);

}  // namespace tessera
