#pragma once
// Ops that measure the cost of dispatch: by time in benchmarks/dtensor_dispatch, and by instructions and allocations in
// tests/dtensor/dispatch_cost_test.
//
// Operands are 8 x 8 floats on a mesh of one rank, so that nothing moves and kernels take almost no time. Plans are
// cached from the second call on.

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

struct DispatchOperands {
  at::Tensor a, b;
  at::Tensor weight;  // of mm and linear; replicated, so that nothing is redistributed
};

struct DispatchOp {
  const char* name;
  std::function<void(const DispatchOperands&)> run;
  /// True if plain tensors have no such op.
  bool dtensor_only = false;
};

const std::vector<DispatchOp>& dispatch_ops();

/// Operands of the ops. The calling rank must have a process group, for a mesh of this rank alone.
DispatchOperands plain_operands();
DispatchOperands dtensor_operands();

}  // namespace tessera
