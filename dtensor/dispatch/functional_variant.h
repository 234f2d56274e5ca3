#pragma once
// Runs in-place and out= ops without a rule as their functional variant, and copies the result. For example, add.out(a,
// b, out) becomes out.copy_(add(a, b)), and renorm_(x, ...) becomes x.copy_(renorm(x, ...)).

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

namespace tessera {

/// Returns the op that returns the result of `op` without writing an argument; nullopt if ATen has none.
std::optional<c10::OperatorHandle> functional_variant(const c10::OperatorHandle& op);

/// Runs `op` as `functional`. Written tensors keep their placements; an out= tensor of other sizes is resized, like a
/// plain one. Throws ValueError if the result's dtype cannot be cast to the written tensor's, or if a written tensor is
/// plain.
void run_functional_variant(const c10::OperatorHandle& op, const c10::OperatorHandle& functional,
                            torch::jit::Stack* stack);

}  // namespace tessera
