#pragma once
// The way back of what an op wrote to an operand that had to move; internal to this package.

#include <ATen/core/dispatch/Dispatcher.h>

#include "dtensor/dispatch/call_signature.h"

namespace tessera {

/// `local`, laid out as `spec` says, is what the op wrote in place of `operand`. It goes where the operand lies: a
/// pending tensor then holds it as its only term. A pending norm, which no terms make negative, is replicated from then
/// on. Throws NotImplementedError if other tensors have that norm's memory too and would not know: on every rank, as
/// long as the program keeps the same tensors on all.
void write_back(const c10::OperatorHandle& op, const CallOperand& operand, const at::Tensor& local,
                const SpecPtr& spec);

}  // namespace tessera
