#pragma once
// malloc's settings for ranks: its own give memory back to the system that the next step needs again.

#include <array>
#include <utility>

namespace tessera {

/// Variables and values. A sharded step frees its gradients and whole parameters; malloc then gives the top of the heap
/// back, and the next step's page faults cost 3 % of it. Blocks from 8 MiB on still go back at once, or the peak grows.
inline constexpr std::array<std::pair<const char*, const char*>, 2> kRankHeap = {
    {{"MALLOC_TRIM_THRESHOLD_", "67108864"}, {"MALLOC_MMAP_THRESHOLD_", "8388608"}}};

}  // namespace tessera
