#pragma once
// Entry point of every op on DTensors, below autograd. Steps: unwrap → propagate (cached) → redistribute → run the op
// on local tensors → wrap.
//
// One boxed fallback for the dispatch key PrivateUse1, like __torch_dispatch__ in Python, plus dispatch_kernel() for
// ATen ops whose CompositeExplicit kernels would bypass a fallback, registered at load time (dispatch_keys.cpp).
// register_sharding() registers dispatch() for such ops of a program. Users call nothing here by name.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>

namespace torch {
class CppFunction;
}

namespace tessera {

struct DispatchStats {
  size_t cache_hits = 0;
  size_t cache_misses = 0;
};

/// Runs `op` on the arguments on `stack`, at least one of which is a DTensor. This is the boxed kernel.
void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

/// Returns the kernel of `op` on DTensors. It is dispatch() or, for the most common signatures, one that does not box
/// arguments if the plan is cached (unboxed_dispatch.cpp).
torch::CppFunction dispatch_kernel(const c10::OperatorHandle& op);

/// Returns counts of the calling thread, whose cache is its own (meshes differ between ranks).
DispatchStats dispatch_stats();

}  // namespace tessera
