#pragma once
// One set of values out of those that each rank saves; internal to this package.
//
//   rank 0 has step 100, lr 0.1, rng.0 "a"      the same summary on all ranks: done. Else rank 0 sends a hash of each
//   rank 1 has step 100, lr 0.1, rng.1 "b"      value, rank 1 sends rng.1, which rank 0 adds to its own
//
// So what ranks share, as they do an optimizer's values, costs a hash, and is neither sent nor parsed.
//
// Thread safety: pure functions, and collectives.

#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/value.h"
#include "checkpoint/rank_sync.h"

namespace tessera::dcp {

/// A few characters that are the same for the same values. Throws ValueError for a text that is not UTF-8.
std::string summary_of(const std::map<Section, Values>& values);

/// On rank 0 the values of all ranks, elsewhere this rank's `own`. `summaries`: of all ranks. Collective; throws
/// ValueError on every rank where a key has two values. Zeros differ by their sign; all NaNs are one.
std::map<Section, Values> merge_values(const RankSync& ranks, std::map<Section, Values> own,
                                       const std::vector<std::string>& summaries);

}  // namespace tessera::dcp
