#include "fsdp1/fsdp_group_mesh.h"

#include <fmt/ranges.h>

#include <string>

#include "base/error.h"
#include "comm/launch/rank_environment.h"
#include "device_mesh/rank_agreement.h"

namespace tessera {

namespace {

/// Returns `count` ranks from `first`, `step` apart.
std::vector<int64_t> ranks_from(int64_t first, int64_t count, int64_t step) {
  std::vector<int64_t> ranks;
  for (int64_t i = 0; i < count; ++i) {
    ranks.push_back(first + i * step);
  }
  return ranks;
}

constexpr const char* kGroupMeshWhere = "FullyShardedDataParallel";

/// Arrangement of the ranks' groups in a grid.
enum class Grid { Whole, Neighbours, Apart, Pairs };

/// Returns the arrangement of this rank's group, or pair of groups. Throws NotImplementedError unless it is an axis of
/// a grid.
Grid make_grid(const FSDPProcessGroup& group) {
  const auto& shard = group.shard_ranks();
  const int64_t world = get_world_size(), own = get_rank();
  const auto size = static_cast<int64_t>(shard.size());
  const int64_t others = world / size;
  const bool divides = world % size == 0;
  const bool neighbours = divides && shard == ranks_from(own / size * size, size, 1);
  const bool apart = divides && shard == ranks_from(own % others, size, others);
  const auto& replicate = group.replicate_ranks();
  const bool is_pair = replicate && neighbours && *replicate == ranks_from(own % size, others, size);
  TESSERA_CHECK(NotImplementedError, replicate ? is_pair : neighbours || apart,
                "{}: a group of ranks {} out of {} is no axis of a grid of all ranks; make groups of neighbours, or of "
                "ranks at equal distances, or pass device_mesh",
                kGroupMeshWhere, replicate && neighbours ? *replicate : shard, world);
  return is_pair ? Grid::Pairs : size == world ? Grid::Whole : neighbours ? Grid::Neighbours : Grid::Apart;
}

}  // namespace

DeviceMesh mesh_of_groups(const FSDPProcessGroup& group, at::DeviceType device) {
  const int64_t world = get_world_size();
  const auto size = static_cast<int64_t>(group.shard_ranks().size());
  Grid grid = Grid::Whole;
  check_ranks_agree({init_device_mesh(device, {world})}, kGroupMeshWhere, [&] {
    grid = make_grid(group);
    return std::vector<std::string>{fmt::format("groups of {} ranks, {}{}", size,
                                                grid == Grid::Apart ? "at equal distances" : "neighbours",
                                                grid == Grid::Pairs ? ", with replicas" : "")};
  });
  switch (grid) {
    case Grid::Pairs:
      return init_device_mesh(device, {world / size, size}, {"replicate", "shard"});
    case Grid::Neighbours:
      return init_device_mesh(device, {world / size, size}, {"other", "dp"})["dp"];
    case Grid::Apart:
      return init_device_mesh(device, {size, world / size}, {"dp", "other"})["dp"];
    case Grid::Whole:
      return init_device_mesh(device, {world}, {"dp"});
  }
  TESSERA_ASSERT(false, "grid {}", static_cast<int>(grid));
}

DeviceMesh mesh_of_hosts(at::DeviceType device) {
  const int64_t world = get_world_size();
  int64_t local = world;
  check_ranks_agree({init_device_mesh(device, {world})}, kGroupMeshWhere, [&] {
    const auto told = parse_local_world_size(process_variable);
    TESSERA_CHECK(ValueError, told || !is_launched(process_variable),
                  "{}: the launcher does not tell how many of the {} ranks are on this host; set LOCAL_WORLD_SIZE, or "
                  "pass device_mesh",
                  kGroupMeshWhere, world);
    local = told.value_or(world);
    TESSERA_CHECK(ValueError, local >= 1 && world % local == 0,
                  "{}: {} ranks on this host do not divide the {} ranks; pass device_mesh", kGroupMeshWhere, local,
                  world);
    return std::vector<std::string>{fmt::format("{} ranks a host", local)};
  });
  return init_device_mesh(device, {world / local, local}, {"replicate", "shard"});
}

}  // namespace tessera
