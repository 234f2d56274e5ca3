#pragma once
// In-place and out= ops without a rule of their own run as their functional form, whose result is then copied into
// the written tensors: add.out(a, b, out) as out.copy_(add(a, b)), renorm_(x, ...) as x.copy_(renorm(x, ...)).

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

namespace tessera {

/// The op that computes what `op` writes and writes nothing itself; nullopt if ATen has none.
std::optional<c10::OperatorHandle> functional_variant(const c10::OperatorHandle& op);

/// Runs `op` as `functional`, its functional_variant. Written tensors keep their placements; an out= tensor of other
/// sizes is resized, as for plain tensors. Throws ValueError if the result's dtype cannot be cast to the written
/// tensor's, or if a written tensor is plain.
void run_functional_variant(const c10::OperatorHandle& op, const c10::OperatorHandle& functional,
                            torch::jit::Stack* stack);

}  // namespace tessera
