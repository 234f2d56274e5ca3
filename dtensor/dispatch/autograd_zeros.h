#pragma once
// Autograd adds up the gradients that meet at one place, and makes plain zeros of those that it knows to be none, such
// as the second gradient of a pooling to its input; internal to this package.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "dtensor/dispatch/call_signature.h"

namespace tessera {

/// Within a backward, where `call` adds a DTensor and a plain tensor of zeros, one to the other or both to a new one:
/// the result is on `stack`, which lacks the arguments, and true is returned. A plain tensor that is written becomes a
/// DTensor, but not where others share its memory, who would not see the sum. (Who made the zeros cannot be told: a
/// hook's own sum that begins with them becomes a DTensor, too.) Collective where sizes and dtypes are equal, and the
/// same on every rank: all run the same backward, but another's plain tensor may hold numbers.
bool add_zeros_of_autograd(const c10::OperatorHandle& op, const CallSignature& call, torch::jit::Stack* stack);

/// Whether, within a backward, the plain tensors of at least one dim in `call` have no elements: gradients of parts
/// that are empty.
bool has_empty_gradients(const CallSignature& call);

}  // namespace tessera
