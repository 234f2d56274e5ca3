#pragma once
// What libtorch's NCCL group, and NCCL, read from the environment when a group is made.

#include <string>

namespace tessera {

/// Sets what docs/gpu.md lists, where it is not set: time-outs abort the communicator and leave the process alive,
/// after the flight recorder was written, to `flight_record_prefix` and the rank unless that is "". Where ranks share
/// GPUs, this process is a host of its own for NCCL, which else refuses them. Thread safety: one call at a time. Before
/// the process's first NCCL group, whose threads read the environment.
void set_nccl_environment(const std::string& flight_record_prefix);

/// Whether TESSERA_SHARE_GPUS is 1 (comm/nccl/nccl_options.h).
bool shares_gpus();

}  // namespace tessera
