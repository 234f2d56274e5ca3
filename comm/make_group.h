#pragma once
// A process group with the backends that suit its ranks; internal to comm.

#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/backend/group_backend.h"
#include "comm/backend_spec.h"
#include "comm/launch/host_process.h"
#include "comm/nccl/nccl_options.h"
#include "comm/process_group.h"

namespace tessera {

/// What carries the CUDA tensors of the default group and of those made from it.
struct CudaUse {
  /// As in BackendSpec.
  std::string backend = BackendSpec::kNone;
  /// This rank's GPU, and how NCCL is set up: for "nccl" alone.
  int device = 0;
  NcclOptions options = {};
};

/// The default group and what others are made from; the calling thread's rank has one (rank_local).
struct DefaultGroup {
  ProcessGroupPtr group = {};
  /// As resolved by init_process_group: ranks known, store or thread world set; backend "" if each group chooses.
  ProcessGroupOptions options = {};
  /// Of the group's ranks, where these are processes on CPUs; otherwise none.
  std::vector<HostProcess> processes = {};
  CudaUse cuda = {};
  /// How often a (name, ranks) was used by new_group.
  std::map<std::string, int> group_counts = {};
};

/// What groups are made from.
struct GroupSource {
  /// As resolved by init_process_group; `backend` is the CPU's, "" if each group chooses, BackendSpec::kNone.
  const ProcessGroupOptions& options;
  const std::vector<HostProcess>& processes;
  const CudaUse& cuda;
};

/// The group of `ranks` of the default group, of which this rank must be one; with the default group's time-out.
/// `caller` opens the messages. Throws as new_group().
GroupInfo info_of_members(const char* caller, const std::vector<int64_t>& ranks, const std::string& name);

/// Every member calls it, with the same `key`, which no other group has.
ProcessGroupPtr make_group(const GroupSource& source, GroupInfo info, const std::string& key);

}  // namespace tessera
