#include "comm/launch/host_layout.h"

#include <algorithm>
#include <set>

namespace tessera {

std::vector<int> HostLayout::ranks_on_host(int rank) const {
  std::vector<int> ranks;
  for (int place = 0; place < per_host; ++place) {
    ranks.push_back(host_index(rank) * per_host + place);
  }
  return ranks;
}

std::vector<int> HostLayout::ranks_across_hosts(int rank) const {
  std::vector<int> ranks;
  for (int host = 0; host < hosts; ++host) {
    ranks.push_back(host * per_host + local_rank(rank));
  }
  return ranks;
}

std::optional<HostLayout> find_host_layout(const std::vector<std::string>& hosts) {
  if (hosts.empty() || std::count(hosts.begin(), hosts.end(), "") > 0) {
    return std::nullopt;
  }
  const auto per_host = std::find_if(hosts.begin(), hosts.end(), [&](const auto& h) { return h != hosts[0]; });
  HostLayout layout{.per_host = static_cast<int>(per_host - hosts.begin())};
  layout.hosts = static_cast<int>(hosts.size()) / layout.per_host;
  const std::set<std::string> names(hosts.begin(), hosts.end());
  if (layout.hosts < 2 || layout.per_host < 2 || layout.size() != static_cast<int>(hosts.size()) ||
      static_cast<int>(names.size()) != layout.hosts) {
    return std::nullopt;
  }
  for (int rank = 0; rank < layout.size(); ++rank) {
    if (hosts[static_cast<size_t>(rank)] != hosts[static_cast<size_t>(layout.ranks_on_host(rank)[0])]) {
      return std::nullopt;
    }
  }
  return layout;
}

}  // namespace tessera
