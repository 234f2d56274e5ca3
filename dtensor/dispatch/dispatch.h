#pragma once
// Where every op on a DTensor arrives, below autograd: unwrap → propagate (cached) → redistribute → run the
// op on the local tensors → wrap.
//
// One boxed fallback for the dispatch key PrivateUse1, as __torch_dispatch__ is in Python, plus dispatch_kernel() for
// those of ATen's ops whose CompositeExplicit kernel would bypass a fallback: registered when the library is loaded
// (dispatch_keys.cpp). For such ops of a program, register_sharding() registers dispatch() when it is called. Users
// call nothing here by name.

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

/// Runs `op` on the arguments on `stack`, of which at least one is a DTensor. The boxed kernel itself.
void dispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

/// The kernel of `op` on DTensors: dispatch(), or, for the commonest signatures, one that boxes no arguments of a call
/// whose plan is cached (unboxed_dispatch.cpp).
torch::CppFunction dispatch_kernel(const c10::OperatorHandle& op);

/// Of the calling thread, since it started: each thread has its own cache (meshes differ between ranks).
DispatchStats dispatch_stats();

}  // namespace tessera
