#pragma once
// Options of process groups over NCCL, for CUDA tensors in builds with --config=cuda (docs/gpu.md).
//
//   init_process_group({.backend = "cpu:gloo,cuda:nccl"}, {.high_priority_stream = true});
//   ProcessGroupPtr half = new_group({0, 1}, "half", {.separate_reduce_scatter = true});
//
// Each rank takes a GPU of its host (comm/nccl/cuda_devices.h) as the thread's current device. A group with a CPU
// backend uses that for barriers; with "nccl" alone there are no collectives for CPU tensors.
//
// To test several ranks with fewer GPUs, set TESSERA_SHARE_GPUS=1 for all of them. Ranks then take the host's GPUs in
// turn, and NCCL, with a different NCCL_HOSTID for each, sends everything through slow sockets.
//
// If a collective does not complete within ProcessGroupOptions::timeout, the group's next collective or wait throws
// CommError on this rank, and the group cannot be used any more. libtorch's watchdog aborts the communicator a minute
// later, after writing the flight recorder; until then, waits for the device block. TORCH_NCCL_ASYNC_ERROR_HANDLING=3
// in the environment restores libtorch's default, which ends the process.

#include <string>

namespace tessera {

struct NcclOptions {
  /// Index of this rank's GPU among those it sees; -1 chooses. For the default group.
  int device = -1;
  /// Runs collectives on a high-priority stream, so that they start before waiting compute kernels.
  bool high_priority_stream = false;
  /// Gives reduce-scatters their own communicator and stream. In a backward of fully_shard, the next unit's all-gather
  /// then does not wait for them. Costs NCCL's buffers twice. Both communicators run at once, for which NCCL requires
  /// the same order of collectives on all ranks; the engine ensures it.
  bool separate_reduce_scatter = false;
  /// Prefix of flight recorder files, for libtorch's fr_trace. With "/tmp/hang_", rank 3 writes /tmp/hang_3 on a
  /// timeout. "" means libtorch's default. The first group of a process decides.
  std::string flight_record_prefix = {};
};

/// Returns libtorch's flight recorder as JSON: the process's latest NCCL collectives and their progress. Throws
/// NotImplementedError in a build without NCCL.
std::string nccl_flight_record();

}  // namespace tessera
