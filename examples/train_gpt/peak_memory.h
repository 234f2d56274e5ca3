#pragma once
// Peak memory of a rank.
//
// On the CPU, it is the resident memory of this process, including shared memory and libraries (Linux's VmHWM;
// getrusage's ru_maxrss would include memory before exec, here the launcher's data), without shards and gradients of
// other ranks that are read in place. On CUDA, it is the memory of tensors on the current device by libtorch's caching
// allocator, without its reserve and without CUDA's and NCCL's own memory.

#include <c10/core/DeviceType.h>

namespace tessera::examples {

inline constexpr double kMebibyte = 1 << 20;

/// Returns bytes. On CUDA, the device must have been used. Throws Error if Linux does not report it.
double peak_memory_bytes(c10::DeviceType device);

/// Returns the kind of memory counted: "resident" or "allocated by tensors on the GPU".
const char* peak_memory_kind(c10::DeviceType device);

}  // namespace tessera::examples
