#pragma once
// Implements thread_call.h by tensor operations alone, for tensors that the host cannot copy by memcpy.
//
// Results have the same bits as on the CPU: bytes are copied, ranks are added in order, and float16 and bfloat16
// accumulate in float32 with one rounding at the end. Min, Max, Avg and complex products are written out, because
// ATen's kernels choose the other of two zeros, multiply by 1/n, or round once where the CPU rounds twice. Tests
// compare it with comm/backend/local_reduce.h on CPU tensors.

#include <c10/util/ArrayRef.h>

#include "comm/backend/collective_call.h"

namespace tessera {

/// Like execute() of thread_call.h, on the current stream. All tensors are on one device, without segments. Version
/// counters do not change.
void execute_by_tensor_ops(c10::ArrayRef<CollectiveCall> calls);
}  // namespace tessera
