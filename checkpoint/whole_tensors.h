#pragma once
// Whole tensors that ranks make of their parts, or have from rank 0: many small ones in one message; internal to this
// package. Thread safety: collectives.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace tessera::dcp {

/// Is called with each tensor whole, by its place, a message at a time.
using TakeWhole = std::function<void(size_t i, const at::Tensor& whole)>;

/// Whole plain tensors of `tensors`; with `copies` false where one is not there already, else copies. Collective.
void gather_wholes(const std::vector<at::Tensor>& tensors, bool copies, const TakeWhole& take);

/// Rank 0's tensors `given`, with sizes, dtype and device of `targets`. `given` is not looked at on other ranks of the
/// default group. Collective.
void broadcast_wholes(const std::vector<at::Tensor>& given, const std::vector<at::Tensor>& targets,
                      const TakeWhole& take);

}  // namespace tessera::dcp
