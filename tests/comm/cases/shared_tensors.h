#pragma once
// Ranks over the "shm" backend: tensors that peers read where they are, and ranks that are stopped at a chosen moment.

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "comm/collectives.h"
#include "testing/run_processes.h"

namespace tessera::testing {

inline const RunProcessesOptions kShm = {.backend = "shm"};

/// Floats: more than a slot has, and no multiple of its size.
inline constexpr int64_t kLarge = 100'003;

/// Floats in a block of comm/shm/shared_memory.h, with undefined contents.
at::Tensor shared_tensor(int64_t numel);

/// `tensor`, of which each rank has an equal share, as the one part of a collective over the default group.
TensorSegments one_part(at::Tensor tensor);

/// The process of a rank. Collective over the default group.
int pid_of(int rank);
/// Returns when a process has stopped.
void await_stop(int pid);

}  // namespace tessera::testing
