#pragma once
// The calls of thread_call.h by tensor operations alone, for tensors that the host cannot reach by memcpy.
//
// A result has the bits of the CPU's: bytes are copied as bytes, ranks are added up in their order, float16 and
// bfloat16 in float32 with one rounding at the end. Min, Max, Avg and complex products are spelled out: ATen's kernels
// take the other one of two zeros, multiply by 1/n, or round once where the CPU rounds twice. Tests run it on CPU
// tensors beside comm/backend/local_reduce.h.

#include <c10/util/ArrayRef.h>

#include "comm/backend/collective_call.h"

namespace tessera {

/// As execute() of thread_call.h, on the calling thread's current stream. All tensors are on one device, none is in
/// parts. Version counters stay as they are.
void execute_by_tensor_ops(c10::ArrayRef<CollectiveCall> calls);
}  // namespace tessera
