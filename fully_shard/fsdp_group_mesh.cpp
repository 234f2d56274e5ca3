#include "fully_shard/fsdp_group_mesh.h"

#include <fmt/ranges.h>

#include <string>

#include "base/error.h"
#include "comm/rank_environment.h"
#include "fully_shard/rank_agreement.h"

namespace tessera {

namespace {

/// count ranks from `first`, `step` apart.
std::vector<int64_t> ranks_from(int64_t first, int64_t count, int64_t step) {
  std::vector<int64_t> ranks;
  for (int64_t i = 0; i < count; ++i) {
    ranks.push_back(first + i * step);
  }
  return ranks;
}

[[noreturn]] void refuse(const std::vector<int64_t>& ranks, int64_t world) {
  throw NotImplementedError(
      fmt::format("FullyShardedDataParallel: a group of ranks {} out of {} is no axis of a grid of all ranks; make "
                  "groups of neighbours, or of ranks at equal distances, or pass device_mesh",
                  ranks, world));
}

}  // namespace

DeviceMesh mesh_of_groups(const FSDPProcessGroup& group, at::DeviceType device) {
  const auto& shard = group.shard_ranks();
  const int64_t world = get_world_size(), own = get_rank();
  const auto size = static_cast<int64_t>(shard.size());
  if (world % size != 0) {
    refuse(shard, world);
  }
  const int64_t others = world / size;
  const bool neighbours = shard == ranks_from(own / size * size, size, 1);
  const bool apart = shard == ranks_from(own % others, size, others);
  if (const auto& replicate = group.replicate_ranks()) {
    if (!neighbours || *replicate != ranks_from(own % size, others, size)) {
      refuse(neighbours ? *replicate : shard, world);
    }
    return init_device_mesh(device, {others, size}, {"replicate", "shard"});
  }
  if (size == world) {
    return init_device_mesh(device, {world}, {"dp"});
  }
  if (!neighbours && !apart) {
    refuse(shard, world);
  }
  return neighbours ? init_device_mesh(device, {others, size}, {"other", "dp"})["dp"]
                    : init_device_mesh(device, {size, others}, {"dp", "other"})["dp"];
}

DeviceMesh mesh_of_hosts(at::DeviceType device) {
  constexpr const char* kWhere = "FullyShardedDataParallel";
  const int64_t world = get_world_size();
  const auto told = parse_local_world_size(process_variable);
  TESSERA_CHECK(ValueError, told || !is_launched(process_variable),
                "{}: the launcher does not tell how many of the {} ranks are on this host; set LOCAL_WORLD_SIZE, or "
                "pass device_mesh",
                kWhere, world);
  const int64_t local = told.value_or(world);
  Statement statement{.items = {fmt::format("{} ranks a host", local)}, .fault = {}};
  if (local < 1 || world % local != 0) {
    statement.fault = fmt::format("{} ranks on this host do not divide the {} ranks; pass device_mesh", local, world);
  }
  check_agreement(init_device_mesh(device, {world}), kWhere, statement);
  return init_device_mesh(device, {world / local, local}, {"replicate", "shard"});
}

}  // namespace tessera
