#pragma once
// Memory of the host that a simulated GPU copies to and from while the host goes on.

#include <ATen/core/CachingHostAllocator.h>

namespace tessera::simulated_gpu {

at::HostAllocator& pinned_allocator();

/// Whether `address` is in memory of pinned_allocator(). Thread safety: any thread.
bool is_pinned(const void* address);

}  // namespace tessera::simulated_gpu
