#pragma once
// Copies an op's result in a redistributed operand back to the operand; internal to this package.

#include <ATen/core/dispatch/Dispatcher.h>

#include "dtensor/dispatch/call_signature.h"

namespace tessera {

/// Copies `local`, placed by `spec`, which the op wrote instead of `operand`, to the operand's placements. A Partial
/// tensor has it as its only term. A NormPartial one becomes replicated, because its terms cannot be negative. Throws
/// NotImplementedError, on every rank if the program keeps the same tensors on all, if other tensors share that norm's
/// memory.
void write_back(const c10::OperatorHandle& op, const CallOperand& operand, const at::Tensor& local,
                const SpecPtr& spec);

}  // namespace tessera
