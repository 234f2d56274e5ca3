#pragma once
// Process groups: who takes part in a collective, and over which backend.
//
//   init_process_group();                                // ranks of torchrun, mpirun, srun; else this process alone
//   ProcessGroupPtr pair = new_group({0, 1}, "pair");    // called by ranks 0 and 1 only
//   all_reduce(tensor, ReduceOp::Sum, default_group());  // comm/collectives.h
//   send(tensor, 1, pair);                               // on rank 0; comm/point_to_point.h
//   destroy_process_group();
//
// A group is a c10d::ProcessGroup with a c10d::Backend for each of its devices, so that c10d's facilities apply to it.
// This header only declares the type: a file that stores a ProcessGroupPtr by value also includes
// <torch/csrc/distributed/c10d/ProcessGroup.hpp>, one that takes it by const reference need not. (That one costs 10 s.)

#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace tessera {

struct NcclOptions;
class ThreadWorld;

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// A c10d::Store or none; lets the options below stay free of c10d's headers.
class StoreHandle {
 public:
  StoreHandle() = default;
  StoreHandle(c10::intrusive_ptr<c10d::Store> store);  // NOLINT: a store may be given as it is
  const c10::intrusive_ptr<c10d::Store>* get() const { return store_.get(); }

 private:
  std::shared_ptr<c10::intrusive_ptr<c10d::Store>> store_;
};

struct ProcessGroupOptions {
  /// "shm" (ranks as processes of one host that share memory, CPU), "gloo" (ranks as processes over TCP, CPU),
  /// "threads" (ranks as threads of this process, CPU and CUDA, where they may share a GPU; for tests), "fake" (any
  /// world size, no data moves), "nccl" (one GPU a rank, CUDA; in builds with --config=cuda, docs/gpu.md), or one for
  /// each device, as in "cpu:gloo,cuda:nccl" (comm/backend_spec.h). "": each group of several ranks takes shm if they
  /// share a host, "hierarchical" (shm on each host, gloo across) if they are as many on each of several hosts and
  /// numbered host after host, and gloo otherwise; or what the environment variable TESSERA_CPU_BACKEND says (gloo or
  /// shm; the same for all ranks). One rank needs none and opens no socket.
  std::string backend = {};
  /// Both given, or both -1: from the environment (comm/launch/rank_environment.h).
  int rank = -1;
  int world_size = -1;
  /// How long a collective waits for its peers, and set-up for the other ranks; above a year the same as a year.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Where rank 0 listens; "" and 0: MASTER_ADDR and MASTER_PORT. Not used where `store` is given.
  std::string master_addr = {};
  int master_port = 0;
  /// How ranks find each other; none: a TCPStore at the master's address.
  StoreHandle store = {};
  /// What ranks as threads share (comm/threads/thread_backend.h); only for "threads" with more than one rank.
  std::shared_ptr<ThreadWorld> thread_world = {};
};

/// Sets up the default group of the calling thread's rank context. Every rank calls it.
/// Throws ValueError (unknown backend, ranks that make no sense, "shm" for ranks on several hosts), NotImplementedError
/// (a backend that this build lacks), StateError (set up already), CommError (the other ranks cannot be reached, or
/// another job meets there; names address and port). After a failure all ranks may call it again, those where it
/// succeeded after destroy_process_group() (comm/context/rank_context.h says what counts as an attempt).
void init_process_group(ProcessGroupOptions options = {});

/// The same with NCCL's options (comm/nccl/nccl_options.h), which new_group uses too where it is given none. Throws
/// also NoDeviceError, ValueError (comm/nccl/cuda_devices.h), the same on every rank; StateError (this program was
/// compiled with another NCCL's header than libtorch).
void init_process_group(ProcessGroupOptions options, const NcclOptions& nccl);

/// Ends the default group. Groups made from it must not be used afterwards. Every rank calls it before its process
/// ends. Over "shm" the group first waits until peers have read what this rank lent them; a process that just exits
/// does not wait, and its peers get an error. Throws StateError if there is none.
void destroy_process_group();

bool is_initialized();

/// Throws StateError if there is none. The reference is valid until destroy_process_group().
const ProcessGroupPtr& default_group();

/// This rank and the number of ranks in the default group.
int get_rank();
int get_world_size();

/// This rank's place in `group` and the number of its ranks.
int get_rank(const ProcessGroupPtr& group);
int get_world_size(const ProcessGroupPtr& group);

/// What carries the group's collectives: "shm", "gloo", "hierarchical", "threads" (also for groups of one rank),
/// "fake", "nccl", or one for each device, as in "cpu:gloo,cuda:nccl".
std::string get_backend(const ProcessGroupPtr& group);

/// Whether the group carries tensors of that device. (libtorch 2.11 has no ProcessGroup::hasBackendForDeviceType.)
bool has_backend(const ProcessGroupPtr& group, c10::DeviceType device_type);

/// The name in messages, e.g. "default" or "tp".
const std::string& group_name(const ProcessGroupPtr& group);

/// The ranks of `group` in the default group, in the order of the group.
std::vector<int64_t> group_ranks(const ProcessGroupPtr& group);

/// A group of `ranks` (of the default group, in this order). Called by its members, and by nobody else; members create
/// groups of the same ranks in the same order. The same name may be used again. A group of one rank needs no peer.
/// Throws ValueError (no ranks, a rank twice, out of range, or the caller not among them).
ProcessGroupPtr new_group(const std::vector<int64_t>& ranks, const std::string& name = "group");

/// A group with NCCL's options of its own; its GPU is the default group's. They have no effect where that has no NCCL.
ProcessGroupPtr new_group(const std::vector<int64_t>& ranks, const std::string& name, const NcclOptions& nccl);

}  // namespace tessera
