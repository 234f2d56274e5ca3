#pragma once
// One block of host memory for many tensors on their way to or from a file; internal to this package.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::dcp {

/// Where tensors of so many bytes begin in a block, one after the other, aligned for every dtype; and, last, the
/// block's own bytes.
std::vector<int64_t> staging_offsets(const std::vector<int64_t>& bytes);

/// `bytes` bytes, uninitialised; in huge pages where the kernel agrees: fewer page faults make a load a fifth faster.
at::Tensor new_staging_block(int64_t bytes);

/// A hint, which never fails: the kernel shall find and clear pages for these bytes now, and not when they are written.
void populate(char* data, int64_t bytes) noexcept;

/// target.copy_(source) for tensors of the same sizes. Between host tensors that lie alike the bytes go past the cache:
/// nobody needs them there soon.
void copy_past_cache(const at::Tensor& target, const at::Tensor& source);

}  // namespace tessera::dcp
