#pragma once
// Process groups: the ranks of a collective and their backend.
//
//   init_process_group();                              // ranks of torchrun, mpirun or srun; otherwise one rank
//   ProcessGroupPtr pair = new_group({0, 1}, "pair");  // called by ranks 0 and 1 only
//
// To store a ProcessGroupPtr by value, include <torch/csrc/distributed/c10d/ProcessGroup.hpp> (10 s to compile).

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

/// Holds an optional c10d::Store without c10d's headers.
class StoreHandle {
 public:
  StoreHandle() = default;
  StoreHandle(c10::intrusive_ptr<c10d::Store> store);  // NOLINT: a store may be given as it is
  const c10::intrusive_ptr<c10d::Store>* get() const { return store_.get(); }

 private:
  std::shared_ptr<c10::intrusive_ptr<c10d::Store>> store_;
};

struct ProcessGroupOptions {
  std::string backend = {};  // "" chooses by host; docs/semantics.md lists the backends
  int rank = -1;             // if both are -1, from the environment (comm/launch/rank_environment.h)
  int world_size = -1;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  // of collectives and set-up; at most a year
  std::string master_addr = {};                                  // where rank 0 listens; default: MASTER_ADDR
  int master_port = 0;                                           // default: MASTER_PORT
  StoreHandle store = {};                                        // default: a TCPStore at the master's address
  std::shared_ptr<ThreadWorld> thread_world = {};                // shared by the ranks of "threads"
};

/// Sets up the default group of the calling thread's rank. All ranks must call it, and may all retry after a failure.
/// Throws ValueError for options that do not fit, NotImplementedError for a backend that this build lacks, StateError
/// if already set up, and CommError if ranks cannot be reached or another job uses the address.
void init_process_group(ProcessGroupOptions options = {});

/// Like the above, with NCCL's options. It throws NoDeviceError and ValueError on every rank
/// (comm/nccl/cuda_devices.h), and StateError if compiled with another NCCL than libtorch.
void init_process_group(ProcessGroupOptions options, const NcclOptions& nccl);

/// Ends the default group and those made from it. All ranks call it before they exit. Throws StateError if none.
void destroy_process_group();

bool is_initialized();

/// Returns the default group, valid until destroy_process_group(). Throws StateError if there is none.
const ProcessGroupPtr& default_group();

int get_rank();  // in the default group
int get_world_size();

int get_rank(const ProcessGroupPtr& group);
int get_world_size(const ProcessGroupPtr& group);

std::string get_backend(const ProcessGroupPtr& group);  // such as "gloo" or "cpu:gloo,cuda:nccl"

bool has_backend(const ProcessGroupPtr& group, c10::DeviceType device_type);  // libtorch 2.11 has no such query

const std::string& group_name(const ProcessGroupPtr& group);  // used in errors, such as "tp"

std::vector<int64_t> group_ranks(const ProcessGroupPtr& group);  // in the default group, in order

/// Makes a group of `ranks` of the default group, in this order. Its members, and no other ranks, call it, in one order
/// per set of ranks. Throws ValueError if ranks are empty, repeated, out of range or without the caller.
ProcessGroupPtr new_group(const std::vector<int64_t>& ranks, const std::string& name = "group");

/// Like the above, with the group's own NCCL options, which have no effect without NCCL.
ProcessGroupPtr new_group(const std::vector<int64_t>& ranks, const std::string& name, const NcclOptions& nccl);

}  // namespace tessera
