#pragma once
// The memory of tensors, and how parameters take on another one's.

#include <ATen/core/Tensor.h>

namespace tessera {

/// Returns an address that all tensors which share memory have in common, a DTensor with its local tensor. Null where
/// there is none, as of a sparse tensor.
const void* memory_of(const at::Tensor& tensor);

/// Makes `tensor` refer to `data` and stay the same object, as set_data does, between any types and devices. Costs a
/// seventh of that, whose checks go through the dispatcher and the DTensor fallback. The tensor gets a new node to
/// accumulate its gradient.
void replace_data(const at::Tensor& tensor, const at::Tensor& data);

/// Clears autocast's weight cache (all threads). Call before a unit's forward, and where its parameters change their
/// state: a cached cast has the memory of that state, and a node older than the unit's boundary.
void forget_autocasts();

}  // namespace tessera
