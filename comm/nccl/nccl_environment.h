#pragma once
// Environment variables that NCCL and libtorch's NCCL group read when a group is made.

#include <string>

namespace tessera {

/// Sets the variables that docs/gpu.md lists, unless they are set. Timeouts then abort the communicator but not the
/// process, after the flight recorder is written to `flight_record_prefix` plus the rank (unless ""). If ranks share
/// GPUs, this process gets its own NCCL host.
/// Thread safety: one call at a time, before the process's first NCCL group, whose threads read the environment.
void set_nccl_environment(const std::string& flight_record_prefix);

/// Returns whether TESSERA_SHARE_GPUS is 1 (comm/nccl/nccl_options.h).
bool shares_gpus();

}  // namespace tessera
