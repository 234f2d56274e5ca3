#pragma once
// Lower bounds for collectives between processes of one host: data in shared memory, a barrier, and a copy or a sum.
// Uses only stream_copy of the library.

#include <algorithm>
#include <cstddef>

namespace tessera {

struct FloorTimes {
  /// Microseconds in which every rank copies `bytes` of each rank by memcpy.
  double all_gather_plain = 0;
  /// Like the above, bypassing the cache (comm/backend/stream_copy.h).
  double all_gather_streamed = 0;
  /// Returns the faster of both.
  double all_gather() const { return std::min(all_gather_plain, all_gather_streamed); }
  /// Every rank adds its chunk of the ranks' `bytes` of floats.
  double reduce_scatter = 0;
  /// One process copies `bytes` for each rank, without a barrier.
  double copy = 0;
};

/// Returns the fastest of `rounds` rounds with `ranks` forked processes. Call it before the process has threads.
FloorTimes measure_shm_floor(int ranks, size_t bytes, int rounds);

}  // namespace tessera
