#pragma once
// The mesh of the tests of the common models.

#include "comm/process_group.h"
#include "device_mesh/device_mesh.h"

namespace tessera::testing {

/// Of all ranks, on the CPU, with one axis "dp".
inline DeviceMesh dp_mesh() {
  return init_device_mesh(at::kCPU, {get_world_size()}, {"dp"});
}

}  // namespace tessera::testing
