#pragma once
// Process groups as axes of a mesh, for users who have groups and an engine that has meshes.

#include "device_mesh/device_mesh.h"
#include "fsdp1/fsdp_options.h"

namespace tessera {

/// Groups of r ranks out of W, as the axis of a grid that holds all ranks: next to each other ({W/r, r}, its second
/// axis) or W/r apart ({r, W/r}, its first). With replicas: both axes. Throws NotImplementedError on ranks whose own
/// group is arranged otherwise, and ValueError on the others then, or on all where ranks' groups differ in size or
/// arrangement. Collective over all ranks of the default group.
DeviceMesh mesh_of_groups(const FSDPProcessGroup& group, at::DeviceType device);

/// (replicas across hosts, shards on one host), by what launchers tell (comm/launch/rank_environment.h). Ranks that
/// none launched, as threads, are on one host. Throws ValueError where the launcher does not tell, as srun (unless
/// LOCAL_WORLD_SIZE is set), or hosts have different numbers of ranks. Collective over all ranks of the default group.
DeviceMesh mesh_of_hosts(at::DeviceType device);

}  // namespace tessera
