#pragma once
// Copies the missing parts of an in-memory checkpoint between hosts. Internal to checkpoint.
//
//   before    host 0: data of ranks 0, 1, 4, 5    host 1, which is new: nothing    host 2: data of ranks 2 to 5
//   after     all hosts: data of ranks 0 to 5

#include <string>

#include "checkpoint/ranks/host_ranks.h"
#include "checkpoint/ranks/rank_sync.h"

namespace tessera::dcp {

/// Verifies the checkpoint at `path`, which is this host's, and completes it on every host. Collective. Returns "", or
/// the error on all ranks: no host has a part of it, or a file cannot be read or written.
std::string complete_on_hosts(const RankSync& ranks, const HostRanks& hosts, const std::string& path);

}  // namespace tessera::dcp
