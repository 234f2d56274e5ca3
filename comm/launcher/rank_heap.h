#pragma once
// malloc's settings for ranks. The defaults return memory to the system that the next step needs again.

#include <array>
#include <utility>

namespace tessera {

/// Variables and values. A sharded step frees its gradients and full parameters; malloc then returns the top of the
/// heap, and the next step's page faults cost 3 % of it. Blocks of 8 MiB or more are still returned, or the peak would
/// grow.
inline constexpr std::array<std::pair<const char*, const char*>, 2> kRankHeap = {
    {{"MALLOC_TRIM_THRESHOLD_", "67108864"}, {"MALLOC_MMAP_THRESHOLD_", "8388608"}}};

}  // namespace tessera
