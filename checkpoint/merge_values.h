#pragma once
// Merges the values that the ranks save, such as step counts. Internal to this package.
//
//   rank 0 has step 100, lr 0.1, rng.0 "a"      If all summaries are equal, nothing is sent. Otherwise rank 0 sends
//   rank 1 has step 100, lr 0.1, rng.1 "b"      a hash of each value, and rank 1 sends rng.1, which rank 0 adds.

#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/value.h"
#include "checkpoint/ranks/rank_sync.h"

namespace tessera::dcp {

/// Returns a string that is equal for equal values. Throws ValueError for text that is not UTF-8.
std::string summarize_values(const std::map<Section, Values>& values);

/// Returns the values of all ranks on rank 0, and `own` elsewhere. Collective. Throws ValueError on every rank if a key
/// has two values. 0.0 and -0.0 differ; all NaNs are equal. `summaries` has one entry per rank.
std::map<Section, Values> merge_values(const RankSync& ranks, std::map<Section, Values> own,
                                       const std::vector<std::string>& summaries);

}  // namespace tessera::dcp
