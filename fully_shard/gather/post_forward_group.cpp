#include "fully_shard/gather/post_forward_group.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "comm/context/rank_context.h"
#include "device_mesh/rank_agreement.h"

namespace tessera {

namespace {

using GroupKey = std::tuple<uint64_t, std::vector<int64_t>>;

struct Cache {
  std::mutex mutex;
  std::map<GroupKey, std::weak_ptr<const ProcessGroupPtr>> groups;
};

Cache& cache() {
  static auto* const cache = new Cache;  // ranks that are threads may outlive static destructors
  return *cache;
}

/// That of units that are still there.
std::shared_ptr<const ProcessGroupPtr> find_known(const GroupKey& key) {
  const std::lock_guard lock(cache().mutex);
  std::erase_if(cache().groups, [](const auto& entry) { return entry.second.expired(); });
  const auto found = cache().groups.find(key);
  return found == cache().groups.end() ? nullptr : found->second.lock();
}

}  // namespace

std::shared_ptr<const ProcessGroupPtr> post_forward_group(const DeviceMesh& mesh, int64_t axis, int64_t size) {
  TESSERA_ASSERT(mesh.size(axis) % size == 0, "{} ranks in groups of {}", mesh.size(axis), size);
  const auto ranks = group_ranks(mesh.group(axis));
  const auto first = ranks.begin() + mesh.local_rank(axis) / size * size;
  const std::vector<int64_t> members(first, first + size);
  const GroupKey key{rank_context_id(), members};
  auto known = find_known(key);
  const auto who_knows = all_gather_strings(mesh, known ? "it" : "");  // one may keep a model that another has given up
  if (std::ranges::none_of(who_knows, &std::string::empty)) {
    return known;
  }
  auto group =
      std::make_shared<const ProcessGroupPtr>(new_group(members, fmt::format("reshard_after_forward_{}", size)));
  const std::lock_guard lock(cache().mutex);
  cache().groups.insert_or_assign(key, group);
  return group;
}

}  // namespace tessera
