#pragma once
// Strategies of FullyShardedDataParallel as an axis of tests.

#include "comm/process_group.h"
#include "device_mesh/device_mesh.h"
#include "fsdp1/fsdp_options.h"

namespace tessera::testing {

using Strategy = ShardingStrategy;

inline constexpr Strategy kAllStrategies[] = {Strategy::FULL_SHARD, Strategy::SHARD_GRAD_OP, Strategy::NO_SHARD,
                                              Strategy::HYBRID_SHARD, Strategy::_HYBRID_SHARD_ZERO2};

/// Returns a mesh of all ranks with the axes that the strategy needs: two replicas on four ranks, else one.
inline DeviceMesh mesh_for(Strategy strategy, at::DeviceType device = at::kCPU) {
  if (strategy != Strategy::HYBRID_SHARD && strategy != Strategy::_HYBRID_SHARD_ZERO2) {
    return init_device_mesh(device, {get_world_size()}, {"dp"});
  }
  const int64_t replicas = get_world_size() == 4 ? 2 : 1;
  return init_device_mesh(device, {replicas, get_world_size() / replicas}, {"replicate", "shard"});
}

}  // namespace tessera::testing
