#pragma once
// The memory of tensors, and how parameters take on another one's.

#include <ATen/core/Tensor.h>

namespace tessera {

/// Returns what all tensors (and DTensors) that share memory have in common; null for a sparse tensor.
const void* storage_id(const at::Tensor& tensor);

/// Makes `tensor` refer to `data` and stay the same object, as set_data does, at a seventh of the cost: nothing is
/// checked, and any types and devices will do. The tensor gets a new node to accumulate its gradient.
void replace_data(const at::Tensor& tensor, const at::Tensor& data);

/// Clears autocast's weight cache (all threads): before a unit's forward, and where its parameters change their state.
void forget_autocasts();

}  // namespace tessera
