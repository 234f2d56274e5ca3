#pragma once
// The most memory that a rank has had so far.
//
// On the CPU it is what the system has counted as resident in this process, shared memory and libraries included
// (Linux's VmHWM; getrusage's ru_maxrss would also count what the process had before exec, here the launcher's data),
// without the shards and gradients of other ranks that this one reads where they lie: they are their owners'.
// On CUDA it is what tensors have had of the current device, as libtorch's caching allocator counts it: without what
// that keeps in reserve, and without what CUDA and NCCL take for themselves.

#include <c10/core/DeviceType.h>

namespace tessera::examples {

inline constexpr double kMebibyte = 1 << 20;

/// In bytes. On CUDA the device must have been used. Throws Error (Linux does not say).
double peak_memory_bytes(c10::DeviceType device);

/// What the number counts: "resident" or "allocated by tensors on the GPU".
const char* peak_memory_kind(c10::DeviceType device);

}  // namespace tessera::examples
