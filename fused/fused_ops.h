#pragma once
// Switch between this package's kernels and ATen's ops, which compute the same except for rounding.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// Enables the kernels for the whole process, which is the default. Must be equal on all ranks. Thread safety: between
/// forwards.
void set_fused_ops(bool enabled);
bool fused_ops_enabled();

namespace fused {

constexpr int64_t kElementsOfThread = 32768;  // minimum per thread, as in ATen

/// Returns whether kernels are enabled and support tensors of this dtype, including DTensors.
bool takes_kernels(const at::Tensor& tensor);

}  // namespace fused

}  // namespace tessera
