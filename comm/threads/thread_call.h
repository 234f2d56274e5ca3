#pragma once
// One collective of ranks that are threads: the work itself.
//
// When all ranks of a group have brought their call, one of them carries it out for all, as a plain function over
// memory; so a collective costs one hand-over, has no data race by construction, and adds in the order of the ranks.
// Tensors that are not in the host's memory are left to thread_call_tensors.h.

#include <c10/util/ArrayRef.h>

#include "comm/backend/collective_call.h"

namespace tessera {

/// Carries out calls (one a rank, in order) that belong together; of a message, that of its sender and its receiver.
/// On a GPU it is given to the calling thread's current stream.
void execute(c10::ArrayRef<CollectiveCall> calls);

}  // namespace tessera
