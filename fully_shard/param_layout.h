#pragma once
// Where each parameter's shard lies in a unit's flat buffer. Integers only.
//
// Rank r's flat shard holds, parameter after parameter, its chunk of dim 0 (cut as torch.chunk cuts), padded
// to the length of a full chunk so that every rank's flat shard is equally long. Example, parameters [5, 3]
// and [2] over 2 ranks: chunks of 3 rows = 9 elements and 1 row = 1 element; offsets are multiples of 8:
//
//   rank 0   rows 0-2 (9) | 7 unused | row 0 (1) | 7 unused        24 elements
//   rank 1   rows 3-4 (6) | 10 unused | row 1 (1) | 7 unused       24 elements
//
// The all-gather of the flat shards is then one collective without copy-in, and rows [c*r, c*(r+1)) of a
// parameter are contiguous in rank r's part.

#include <ATen/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "dtensor/shard_math.h"

namespace tessera {

struct ParamSlot {
  int64_t rows = 0;         // size of dim 0
  int64_t row_numel = 0;    // elements of one row
  int64_t chunk_numel = 0;  // elements of a full chunk
  int64_t offset = 0;       // in a flat shard, in elements
  bool operator==(const ParamSlot&) const = default;

  int64_t numel() const { return rows * row_numel; }
  /// The rows of `rank`, of `num_ranks`.
  DimRange rows_of(int64_t rank, int64_t num_ranks) const { return chunk_range(rows, num_ranks, rank); }
};

struct ParamLayout {
  std::vector<ParamSlot> slots;
  int64_t num_ranks = 1;
  int64_t shard_numel = 0;  // of every rank's flat shard; a multiple of 8
};

/// Offsets are multiples of it: 16 bytes for 2-byte dtypes, which collectives and vector loads want.
inline constexpr int64_t kSlotAlignment = 8;

/// `shapes`: sizes of each parameter, of at least one dim.
ParamLayout make_param_layout(const std::vector<std::vector<int64_t>>& shapes, int64_t num_ranks);

}  // namespace tessera
