#include "checkpoint/ranks/host_ranks.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <numeric>

#include "base/error.h"
#include "comm/process_group.h"

namespace tessera::dcp {

namespace {

/// Identifies a folder, which need not exist yet, among those of all hosts.
std::string identity_of(const std::string& folder) {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat status {};
  return stat(folder.c_str(), &status) == 0 ? fmt::format("{} {}:{}", boot, status.st_dev, status.st_ino)
                                            : fmt::format("{} {}", boot, folder);
}

}  // namespace

int HostRanks::keeper_of(int rank) const {
  for (size_t host = 0; host < hosts.size(); ++host) {
    const auto found = std::ranges::find(hosts[host], rank);
    if (found != hosts[host].end()) {
      const auto& next = hosts[(host + 1) % hosts.size()];
      return next[static_cast<size_t>(found - hosts[host].begin()) % next.size()];
    }
  }
  detail::assertion_failed("a host has each rank", __FILE__, __LINE__, fmt::format("rank {}", rank));
}

HostRanks one_host(const RankSync& ranks) {
  std::vector<int> all(static_cast<size_t>(ranks.size()));
  std::iota(all.begin(), all.end(), 0);
  return {.hosts = {all}, .own = 0, .place = static_cast<size_t>(ranks.rank())};
}

HostRanks find_hosts(const RankSync& ranks, const std::string& folder) {
  const auto identities = ranks.exchange([&] { return folder.empty() ? std::string() : identity_of(folder); });
  const auto without = std::ranges::count(identities, "");
  TESSERA_CHECK(StateError, without < ranks.size(),
                "Checkpointer: save_in_memory: there is no memory_folder; launch_local makes job_memory_folder(), and "
                "under another launcher TESSERA_MEMORY_DIR names a new folder of the job");
  TESSERA_CHECK(ValueError, without == 0, "Checkpointer: {} of {} ranks have no memory_folder; give all one", without,
                ranks.size());
  HostRanks found;
  std::map<std::string, size_t> places;
  for (size_t rank = 0; rank < identities.size(); ++rank) {
    const auto [entry, is_new] = places.emplace(identities[rank], found.hosts.size());
    if (is_new) {
      found.hosts.emplace_back();
    }
    auto& host = found.hosts[entry->second];
    if (static_cast<int>(rank) == ranks.rank()) {
      found.own = entry->second;
      found.place = host.size();
    }
    host.push_back(static_cast<int>(rank));
  }
  TESSERA_CHECK(NotImplementedError, found.is_one() || has_backend(default_group(), at::kCPU),
                "Checkpointer: in-memory checkpoints of {} hosts need a CPU backend, as in \"cpu:gloo,cuda:nccl\"",
                found.hosts.size());
  return found;
}

}  // namespace tessera::dcp
