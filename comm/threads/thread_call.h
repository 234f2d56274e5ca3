#pragma once
// Carries out one collective of ranks that are threads.
//
// When all ranks have posted their call, one of them executes it for all, as a plain function over memory. So a
// collective costs one hand-over, has no data race by construction, and adds in the order of the ranks. Tensors outside
// the host's memory are left to thread_call_tensors.h.

#include <c10/util/ArrayRef.h>

#include "comm/backend/collective_call.h"

namespace tessera {

/// Executes matching calls, in rank order (sender and receiver of a message), on the current stream if they are on a
/// GPU.
void execute(c10::ArrayRef<CollectiveCall> calls);

}  // namespace tessera
