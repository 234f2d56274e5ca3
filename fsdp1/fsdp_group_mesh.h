#pragma once
// Converts process groups to axes of a mesh. All ranks of the default group must call these functions.

#include "device_mesh/device_mesh.h"
#include "fsdp1/fsdp_options.h"

namespace tessera {

/// Makes a mesh of all ranks with `group` as an axis, or as both with replicas. The group's ranks must be neighbors or
/// at equal distances. Throws NotImplementedError on ranks whose group is arranged otherwise, and ValueError on the
/// rest or if arrangements differ.
DeviceMesh mesh_of_groups(const FSDPProcessGroup& group, at::DeviceType device);

/// Makes a mesh of (replicas across hosts, shards on a host). Throws ValueError if the launcher does not report hosts
/// (srun without LOCAL_WORLD_SIZE), or if they have different numbers of ranks.
DeviceMesh mesh_of_hosts(at::DeviceType device);

}  // namespace tessera
