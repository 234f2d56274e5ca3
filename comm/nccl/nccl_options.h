#pragma once
// Process groups over NCCL, for CUDA tensors, in builds with --config=cuda (docs/gpu.md).
//
//   init_process_group({.backend = "cpu:gloo,cuda:nccl"}, {.high_priority_stream = true});
//   ProcessGroupPtr half = new_group({0, 1}, "half", {.separate_reduce_scatter = true});
//
// Each rank takes a GPU of its host (comm/nccl/cuda_devices.h), and makes it the thread's current device. A group with
// a CPU backend beside it uses that for barriers; with "nccl" alone there are no collectives for CPU tensors.
//
// To try out several ranks where there are fewer GPUs, set TESSERA_SHARE_GPUS=1 in the environment of all of them:
// ranks then take the host's GPUs in turn, and NCCL, which is told that each is on a host of its own (NCCL_HOSTID),
// sends everything through sockets. That is slow, and for tests alone.
//
// After a collective that is not complete after ProcessGroupOptions::timeout the next one of the group, or the wait for
// one, throws CommError on this rank, and the group is of no more use. A minute later, in which libtorch writes its
// flight recorder's last entries, its watchdog thread ends the communicator: until then whoever waits for the device
// waits on. libtorch's own default, to end the process, comes back with TORCH_NCCL_ASYNC_ERROR_HANDLING=3 in the
// environment: what a user sets there is left alone (docs/gpu.md).

#include <string>

namespace tessera {

struct NcclOptions {
  /// The index of this rank's GPU among those that it sees; -1: chosen. For the default group.
  int device = -1;
  /// Collectives run on a stream of high priority: they start before compute kernels that wait as well.
  bool high_priority_stream = false;
  /// Reduce-scatters have a communicator, and so a stream, of their own: in a backward of fully_shard the next unit's
  /// all-gather does not wait for them. It costs NCCL's buffers a second time. Both communicators run at once then,
  /// which NCCL allows where ranks issue their collectives in one order, as the engine does.
  bool separate_reduce_scatter = false;
  /// "/tmp/hang_" lets rank 3 write /tmp/hang_3 when a collective times out, for libtorch's fr_trace; "": where
  /// libtorch puts it. The first group of a process decides.
  std::string flight_record_prefix = {};
};

/// What NCCL's collectives of this process were last, and how far they came: libtorch's flight recorder as JSON.
/// Throws NotImplementedError in a build without NCCL.
std::string nccl_flight_record();

}  // namespace tessera
