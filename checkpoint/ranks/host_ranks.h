#pragma once
// Groups ranks by host: ranks that share a folder of in-memory checkpoints are on one host. Internal to checkpoint.
//
//   ranks 0 and 1 see one folder, 2 and 3 another    hosts {0, 1}, {2, 3}: rank 2 keeps a copy of rank 0's data, and 0
//                                                    of rank 2's

#include <string>
#include <vector>

#include "checkpoint/ranks/rank_sync.h"

namespace tessera::dcp {

struct HostRanks {
  std::vector<std::vector<int>> hosts;  // in the order of their first ranks
  size_t own = 0;                       // this rank's host
  size_t place = 0;                     // of this rank there

  bool is_one() const { return hosts.size() == 1; }
  bool leads() const { return place == 0; }
  int leader() const { return hosts[own][0]; }
  /// Returns the rank of the next host that keeps a copy of what `rank` saves.
  int keeper_of(int rank) const;
};

/// Returns all ranks as those of one host.
HostRanks one_host(const RankSync& ranks);

/// Finds the hosts from each rank's `folder`. Collective. Throws StateError if all are empty, ValueError if only some
/// are, and NotImplementedError for several hosts without a CPU backend.
HostRanks find_hosts(const RankSync& ranks, const std::string& folder);

}  // namespace tessera::dcp
