#pragma once
// Memory of tensors, and how a parameter adopts another tensor's memory.

#include <ATen/core/Tensor.h>

namespace tessera {

/// Returns an identifier of the memory, equal for all tensors and DTensors that share it; null for a sparse tensor.
const void* storage_id(const at::Tensor& tensor);

/// Makes `tensor` refer to `data` and stay the same object, like set_data at a seventh of the cost. It checks nothing
/// and accepts any types and devices. The tensor gets a new node to accumulate its gradient.
void replace_data(const at::Tensor& tensor, const at::Tensor& data);

/// Clears autocast's weight cache (all threads). Call it before a unit's forward, and when its parameters change state.
void forget_autocasts();

}  // namespace tessera
