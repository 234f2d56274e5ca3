#pragma once
// Handles plain zeros that autograd adds to DTensor gradients, such as the second gradient of a pooling's input.
// Internal to this package.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "dtensor/dispatch/call_signature.h"

namespace tessera {

/// Handles a call, within a backward, that adds a DTensor and a plain tensor of zeros, in place or not. Pops the
/// arguments, pushes the result and returns true. A plain tensor that is written becomes a DTensor, unless others share
/// its memory and would not see the sum. (A hook's own sum that begins with zeros cannot be distinguished and becomes a
/// DTensor too.) If sizes and dtypes are equal, all ranks must call it, and the result is equal on all: they run the
/// same backward, but plain tensors of other ranks may be nonzero.
bool add_zeros_of_autograd(const c10::OperatorHandle& op, const CallSignature& call, torch::jit::Stack* stack);

/// Returns whether, within a backward, all plain tensors of `call` with at least one dim are empty.
bool has_empty_gradients(const CallSignature& call);

}  // namespace tessera
