#pragma once
// Whether the functions of this folder run their own kernels, or ATen's ops. Both compute the same, but for rounding.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// Decides for the whole process; true at first. Ranks must agree. Thread safety: between forwards.
void set_fused_ops(bool enabled);
bool fused_ops_enabled();

namespace fused {

constexpr int64_t kElementsOfThread = 32768;  // at least, as in ATen

/// Returns whether kernels take tensors of this dtype, DTensors included, and may run.
bool takes_kernels(const at::Tensor& tensor);

}  // namespace fused

}  // namespace tessera
