#pragma once
// A block of host memory for many tensors on their way to or from files. Internal to this package.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::dcp {

/// Returns the offsets of tensors of these sizes in a block, aligned for every dtype, and then the block's size.
std::vector<int64_t> staging_offsets(const std::vector<int64_t>& bytes);

/// Returns uninitialized memory, in huge pages if possible: fewer page faults make a load 20 % faster.
at::Tensor new_staging_block(int64_t bytes);

void populate(char* data, int64_t bytes) noexcept;  // asks the kernel for the pages now; a hint

/// Copies like copy_(), between equal sizes. Bypasses the cache between host tensors of equal layout, which are not
/// used soon.
void copy_past_cache(const at::Tensor& target, const at::Tensor& source);

}  // namespace tessera::dcp
