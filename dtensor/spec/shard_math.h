#pragma once
// Computes how a dim is sharded, with integers only.
//
// Shards are torch.chunk's: with c = ceil(size / n), rank r has [min(r*c, size), min((r+1)*c, size)). For size 5 on 4
// ranks, c = 2, and ranks have 2, 2, 1 and 0 rows. Every rank can compute all shards, so uneven and empty ones need no
// communication about sizes.

#include <ATen/ArrayRef.h>
#include <c10/util/DimVector.h>

#include <cstdint>

#include "dtensor/spec/placement.h"

namespace tessera {

using c10::DimVector;

/// Half-open range [offset, offset + length) of a dim.
struct DimRange {
  int64_t offset = 0;
  int64_t length = 0;
  bool operator==(const DimRange&) const = default;
};

/// Returns ceil(size / num_chunks), the length of all chunks but the last nonempty one.
inline int64_t chunk_length(int64_t size, int64_t num_chunks) {
  return (size + num_chunks - 1) / num_chunks;
}

/// Returns chunk `index` of [0, size).
DimRange chunk_range(int64_t size, int64_t num_chunks, int64_t index);

/// Sizes of a mesh's axes, and a rank's coordinate.
struct MeshPosition {
  at::IntArrayRef axis_sizes;
  at::IntArrayRef coordinate;
};

/// Returns the range of `dim` (of global size `size`) at `position`: axes shard it one after another, in shard_order.
DimRange local_range(int64_t size, int64_t dim, const Placements& placements, const MeshPosition& position);

/// Returns the sizes of the local tensor at `position`.
DimVector local_sizes(at::IntArrayRef sizes, const Placements& placements, const MeshPosition& position);

/// Returns whether a tensor of these sizes has no elements.
bool is_empty(at::IntArrayRef sizes);

}  // namespace tessera
