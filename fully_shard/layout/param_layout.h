#pragma once
// ParamLayout: the position of each parameter's shard in a unit's flat buffer, and the copies from there. Integers
// only.
//
// Rank r's flat shard contains its chunk of each parameter's sharded dim (as torch.chunk divides it), padded to the
// length of a full chunk. Example: parameters [5, 3] and [2] over 2 ranks have chunks of 3 rows = 9 elements and 1 row
// = 1 element; offsets are multiples of 8:
//
//   rank 0   rows 0-2 (9) | 7 unused | row 0 (1) | 7 unused        24 elements
//   rank 1   rows 3-4 (6) | 10 unused | row 1 (1) | 7 unused       24 elements
//
// In the gathered buffer, a parameter sharded on dim 0 has at most two blocks: the full chunks and the rest. Sharded on
// another dim, it has one block per rank, with as many rows as the preceding dims have elements.

#include <ATen/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "dtensor/spec/shard_math.h"

namespace tessera {

/// Slot of a parameter. With sizes [4, 5, 3] sharded on dim 1, it has outer 4, rows 5 and row_numel 3.
struct ParamSlot {
  int64_t outer = 1;        // elements of the dims before the sharded one
  int64_t rows = 0;         // size of the sharded dim
  int64_t row_numel = 0;    // elements of the dims after it
  int64_t chunk_numel = 0;  // elements of a full chunk
  int64_t offset = 0;       // in a flat shard, in elements
  bool operator==(const ParamSlot&) const = default;

  int64_t numel() const { return outer * rows * row_numel; }
  DimRange rows_on(int64_t rank, int64_t num_ranks) const { return chunk_range(rows, num_ranks, rank); }
  int64_t numel_on(int64_t rank, int64_t num_ranks) const {
    return outer * rows_on(rank, num_ranks).length * row_numel;
  }
  /// Return the number of leading ranks with a full chunk, and the number of elements on the next rank.
  int64_t full_chunks() const { return chunk_numel == 0 ? 0 : numel() / chunk_numel; }
  int64_t rest_numel() const { return chunk_numel == 0 ? 0 : numel() % chunk_numel; }
};

/// Copy of `rows` pieces of `cols` elements, with the start and distance of pieces on both sides.
struct BlockCopy {
  int64_t flat_offset = 0;
  int64_t flat_stride = 0;
  int64_t param_offset = 0;
  int64_t param_stride = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  bool operator==(const BlockCopy&) const = default;
};

struct FlatRange {
  int64_t offset = 0;
  int64_t numel = 0;
  bool operator==(const FlatRange&) const = default;
};

/// Alignment of offsets in elements: 16 bytes for 2-byte dtypes, as collectives and vector loads prefer.
inline constexpr int64_t kSlotAlignment = 8;

inline int64_t aligned_numel(int64_t numel) {
  return (numel + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

struct ParamLayout {
  std::vector<ParamSlot> slots;
  int64_t num_ranks = 1;
  int64_t shard_numel = 0;  // size of every rank's flat shard; a multiple of 8

  /// Returns whether each rank's shard of every parameter is a contiguous range of the parameter.
  bool is_cut_on_dim_0() const;

  /// Returns the copies of one parameter in a buffer with `rank_numel` elements per rank, beginning with the flat
  /// shard.
  std::vector<BlockCopy> copies(const ParamSlot& slot, int64_t rank_numel) const;
  /// Returns the ranges of the ranks' flat shards in such a buffer that no copy touches.
  std::vector<FlatRange> unused(int64_t rank_numel) const;
};

/// Packs slots one after the other, ignoring their previous offsets.
ParamLayout pack_slots(std::vector<ParamSlot> slots, int64_t num_ranks);

/// Lays out parameters with these sizes (at least one dim), sharded on `dims` (empty: dim 0).
ParamLayout make_param_layout(const std::vector<std::vector<int64_t>>& shapes, int64_t num_ranks,
                              const std::vector<int64_t>& dims = {});

}  // namespace tessera
