#include "dtensor/random/shard_of_whole.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>

namespace tessera {

namespace {

/// Returns whether elements are stored without gaps, in any order of dims.
bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<size_t> dims(sizes.size());
  std::iota(dims.begin(), dims.end(), size_t{0});
  std::erase_if(dims, [&](size_t dim) { return sizes[dim] == 1; });
  std::sort(dims.begin(), dims.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t expected = 1;
  for (const size_t dim : dims) {
    if (strides[dim] != expected) {
      return false;
    }
    expected *= sizes[dim];
  }
  return true;
}

}  // namespace

std::optional<ShardOfWhole> shard_of_whole(const DTensorSpec& spec, at::IntArrayRef local_strides) {
  if (spec.has_partial() || !(is_empty(spec.sizes()) || is_dense(spec.sizes(), spec.strides()))) {
    return std::nullopt;
  }
  ShardOfWhole shard{.sizes = spec.local_sizes().vec(),
                     .whole_strides = spec.strides().vec(),
                     .local_strides = local_strides.vec(),
                     .whole_numel = c10::multiply_integers(spec.sizes())};
  for (int64_t dim = 0; dim < spec.ndim(); ++dim) {
    const DimRange range = local_range(spec.sizes()[static_cast<size_t>(dim)], dim, spec.placements(), spec.position());
    shard.whole_offset += range.offset * shard.whole_strides[static_cast<size_t>(dim)];
  }
  return shard;
}

}  // namespace tessera
