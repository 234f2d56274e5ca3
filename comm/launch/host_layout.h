#pragma once
// How the ranks of a group lie on hosts. Integers only.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Ranks 0 to per_host - 1 on the first host, as many on the next, and so on.
struct HostLayout {
  int hosts = 1;
  int per_host = 1;

  int size() const { return hosts * per_host; }
  int host_of(int rank) const { return rank / per_host; }
  /// The rank's place on its host.
  int place_of(int rank) const { return rank % per_host; }
  /// All ranks on the host of `rank`, in order, and those with its place on each host.
  std::vector<int> on_host_of(int rank) const;
  std::vector<int> across_hosts_of(int rank) const;
};

/// The layout of ranks whose hosts are these, if there are several hosts, of several ranks each, that lie as above; ""
/// is a host that cannot be told.
std::optional<HostLayout> find_host_layout(const std::vector<std::string>& hosts);

}  // namespace tessera
