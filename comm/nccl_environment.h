#pragma once
// What libtorch's NCCL group reads from the environment when it is made.

#include <string>

namespace tessera {

/// Sets what docs/gpu.md lists, where it is not set: time-outs abort the communicator and leave the process alive,
/// after the flight recorder was written, to `flight_record_prefix` and the rank unless that is "". Thread safety: one
/// call at a time. Before the process's first NCCL group, whose threads read the environment.
void set_nccl_environment(const std::string& flight_record_prefix);

}  // namespace tessera
