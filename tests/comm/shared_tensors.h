#pragma once
// Tensors that peers read where they are, and ranks that are stopped at a chosen moment.

#include <ATen/core/Tensor.h>

namespace tessera::testing {

/// Floats in a block of comm/shared_memory.h, with undefined contents.
at::Tensor shared_tensor(int64_t numel);

/// The process of a rank. Collective over the default group.
int pid_of(int rank);
/// Returns when a process has stopped.
void await_stop(int pid);

}  // namespace tessera::testing
