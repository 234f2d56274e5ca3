#pragma once
// Host memory that a simulated GPU copies to and from asynchronously.

#include <ATen/core/CachingHostAllocator.h>

namespace tessera::simulated_gpu {

at::HostAllocator& pinned_allocator();

/// Returns whether `address` is in memory of pinned_allocator(). Thread safety: any thread.
bool is_pinned(const void* address);

}  // namespace tessera::simulated_gpu
