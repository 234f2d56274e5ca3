#pragma once
// DataParallelAxes: the mesh axes for a unit's shards and replicas.
//
//   fully_shard, mesh {dp: 4}                shards over dp
//   fully_shard, mesh {replicate: 2, dp: 4}  shards over dp, replicas over replicate (HSDP)
//   replicate,   mesh {dp: 4}                replicas over dp, no shards

#include <cstdint>
#include <optional>

#include "device_mesh/device_mesh.h"
#include "dtensor/spec/placement.h"

namespace tessera {

struct DataParallelAxes {
  DeviceMesh mesh;
  std::optional<int64_t> shard_axis;
  std::optional<int64_t> replica_axis;

  /// Takes a 1-D or 2-D mesh.
  static DataParallelAxes sharded(DeviceMesh mesh) {
    const bool has_replicas = mesh.ndim() == 2;
    return {.mesh = std::move(mesh),
            .shard_axis = has_replicas ? 1 : 0,
            .replica_axis = has_replicas ? std::optional<int64_t>(0) : std::nullopt};
  }
  /// Takes a 1-D mesh.
  static DataParallelAxes replicated(DeviceMesh mesh) {
    return {.mesh = std::move(mesh), .shard_axis = std::nullopt, .replica_axis = 0};
  }

  int64_t num_shards() const { return shard_axis ? mesh.size(*shard_axis) : 1; }
  int64_t num_replicas() const { return replica_axis ? mesh.size(*replica_axis) : 1; }
  int64_t shard_rank() const { return shard_axis ? mesh.local_rank(*shard_axis) : 0; }
  /// Requires more than one shard.
  const ProcessGroupPtr& shard_group() const { return mesh.group(shard_axis.value()); }
  /// Requires replicas.
  const ProcessGroupPtr& replica_group() const { return mesh.group(replica_axis.value()); }

  /// Returns the placements of a parameter that is sharded on `dim`.
  Placements placements(int64_t dim) const {
    Placements placements(static_cast<size_t>(mesh.ndim()), Replicate());
    if (shard_axis) {
      placements[static_cast<size_t>(*shard_axis)] = Shard(dim);
    }
    return placements;
  }
};

}  // namespace tessera
