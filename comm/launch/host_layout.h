#pragma once
// Layout of a group's ranks over hosts. Integers only.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Ranks 0 to per_host - 1 are on the first host, the next per_host on the second, and so on.
struct HostLayout {
  int hosts = 1;
  int per_host = 1;

  int size() const { return hosts * per_host; }
  int host_index(int rank) const { return rank / per_host; }
  int local_rank(int rank) const { return rank % per_host; }  // place on its host
  std::vector<int> ranks_on_host(int rank) const;             // all ranks on the host of `rank`, in order
  std::vector<int> ranks_across_hosts(int rank) const;        // the ranks at the same place on all hosts
};

/// Returns the layout of ranks on these hosts. Needs several hosts with several ranks each, none unknown ("").
std::optional<HostLayout> find_host_layout(const std::vector<std::string>& hosts);

}  // namespace tessera
