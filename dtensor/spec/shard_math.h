#pragma once
// How a dim is cut over ranks: integers only.
//
// The cut is torch.chunk's: with c = ceil(size / n), rank r holds [min(r*c, size), min((r+1)*c, size)).
// Example, size 5 over 4 ranks: c = 2, so the ranks hold 2, 2, 1 and 0 rows. Every rank can compute every
// other rank's piece, which is what makes uneven and empty shards free of communication about sizes.

#include <ATen/ArrayRef.h>
#include <c10/util/DimVector.h>

#include <cstdint>

#include "dtensor/spec/placement.h"

namespace tessera {

using c10::DimVector;

/// A half-open range [offset, offset + length) of a dim.
struct DimRange {
  int64_t offset = 0;
  int64_t length = 0;
  bool operator==(const DimRange&) const = default;
};

/// ceil(size / num_chunks): the length of every chunk but the last non-empty one.
inline int64_t chunk_length(int64_t size, int64_t num_chunks) {
  return (size + num_chunks - 1) / num_chunks;
}

/// The piece of [0, size) that belongs to `index` of `num_chunks`.
DimRange chunk_range(int64_t size, int64_t num_chunks, int64_t index);

/// The mesh as far as shards are concerned: the size of each axis and this rank's place on it.
struct MeshPosition {
  at::IntArrayRef axis_sizes;
  at::IntArrayRef coordinate;
};

/// The part of `dim` (of global size `size`) that the rank at `position` holds: each axis that shards it
/// cuts what the axes before it in cut_order left.
DimRange local_range(int64_t size, int64_t dim, const Placements& placements, const MeshPosition& position);

/// Global sizes → the sizes of the local tensor at `position`.
DimVector local_sizes(at::IntArrayRef sizes, const Placements& placements, const MeshPosition& position);

/// Whether a tensor of these sizes has no elements.
bool is_empty(at::IntArrayRef sizes);

}  // namespace tessera
