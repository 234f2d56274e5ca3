#pragma once
// Gathers DTensors and broadcasts tensors of rank 0, many small ones per message. Internal to this package.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace tessera::dcp {

using TakeWhole = std::function<void(size_t i, const at::Tensor& whole)>;  // receives tensors[i], a message at a time

/// Calls `take` with each tensor as a whole plain one, copied if `copies`. Collective.
void gather_wholes(const std::vector<at::Tensor>& tensors, bool copies, const TakeWhole& take);

/// Calls `take` with rank 0's tensors `given`, which have the sizes, dtypes and devices of `targets`. Collective over
/// the default group, whose other ranks do not read `given`.
void broadcast_wholes(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& targets,
                      const TakeWhole& take);

}  // namespace tessera::dcp
