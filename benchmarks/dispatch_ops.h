#pragma once
// The ops by which the cost of dispatch is judged: by time in benchmarks/dtensor_dispatch, by instructions and
// allocations in tests/dtensor/dispatch_cost_test.
//
// 8 x 8 floats on a mesh of one rank, so that nothing moves and the kernels take next to no time; plans are cached
// from the second call on.

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

struct DispatchOperands {
  at::Tensor a, b;
};

struct DispatchOp {
  const char* name;
  std::function<void(const DispatchOperands&)> run;
  /// The op is none of a plain tensor's.
  bool dtensor_only = false;
};

const std::vector<DispatchOp>& dispatch_ops();

/// Operands of the ops. The calling rank must have a process group, for a mesh of this rank alone.
DispatchOperands plain_operands();
DispatchOperands dtensor_operands();

}  // namespace tessera
