#pragma once
// Checks numbers that a dtype cannot hold. Fill kernels reject them, but not for tensors without elements nor, on the
// CPU, for single elements of 16 bits. All ranks must reject them.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>

namespace tessera {

/// Throws the error of a kernel that fills `numel` elements of `part`'s dtype with `value`. The value is a number or a
/// tensor without dims; `part` is this rank's shard.
template <class Value>
void check_fill(const at::Tensor& part, int64_t numel, const Value& value) {
  const int64_t telling = std::min<int64_t>(2, numel);
  if (part.numel() < telling) {
    at::empty({telling}, part.options()).fill_(value);
  }
}

}  // namespace tessera
