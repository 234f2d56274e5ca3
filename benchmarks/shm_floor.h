#pragma once
// What collectives between processes of one host cost at least: data that lies in shared memory already, a barrier, and
// a copy or a sum. Of the library there is only the copy past the cache in it.

#include <cstddef>

namespace tessera {

struct FloorTimes {
  /// Microseconds: every rank copies `bytes` of each rank.
  double all_gather = 0;
  /// The same, the copies being stored past the cache (comm/backend/stream_copy.h).
  double all_gather_streamed = 0;
  /// Every rank adds its part of the ranks' `bytes` of floats.
  double reduce_scatter = 0;
  /// One process copies `bytes` for each rank, without a barrier.
  double copy = 0;
};

/// The fastest of `rounds` rounds with `ranks` forked processes. Call it before the process has threads.
FloorTimes measure_shm_floor(int ranks, size_t bytes, int rounds);

}  // namespace tessera
