#pragma once
// Process groups as axes of a mesh, for users who have groups and an engine that has meshes.

#include "device_mesh/device_mesh.h"
#include "fully_shard/fsdp_options.h"

namespace tessera {

/// Groups of r ranks out of W, as the axis of a grid that holds all ranks: next to each other ({W/r, r}, its second
/// axis) or W/r apart ({r, W/r}, its first). With replicas: both axes. Throws NotImplementedError for ranks in any
/// other arrangement. Collective over all ranks of the default group.
DeviceMesh mesh_of_groups(const FSDPProcessGroup& group, at::DeviceType device);

/// (replicas across hosts, shards on one host). Ranks as threads, and a launcher that does not set LOCAL_WORLD_SIZE,
/// are one host. Collective over all ranks of the default group.
DeviceMesh mesh_of_hosts(at::DeviceType device);

}  // namespace tessera
