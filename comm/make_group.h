#pragma once
// Makes process groups with the right backends; internal to comm.

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

/// Backend for CUDA tensors of the default group and of groups made from it.
struct CudaUse {
  std::string backend = BackendSpec::kNone;  // see BackendSpec
  int device = 0;                            // this rank's GPU, for "nccl"
  NcclOptions options = {};
};

/// Default group of a rank (rank_local), and the data that other groups are made from.
struct DefaultGroup {
  ProcessGroupPtr group = {};
  ProcessGroupOptions options = {};         // resolved; backend "" if each group chooses
  std::vector<HostProcess> processes = {};  // of all ranks, if these are processes on CPUs
  CudaUse cuda = {};
  std::map<std::string, int> group_counts = {};  // uses of a name and ranks in new_group
};

struct GroupSource {
  const ProcessGroupOptions& options;  // resolved; `backend` is the CPU's, "" or kNone
  const std::vector<HostProcess>& processes;
  const CudaUse& cuda;
};

/// Returns the info of a group that includes this rank. `caller` starts error messages. Throws like new_group().
GroupInfo info_of_members(const char* caller, const std::vector<int64_t>& ranks, const std::string& name);

/// Makes the group. All of its members call this, with the same unique `key`.
ProcessGroupPtr make_group(const GroupSource& source, GroupInfo info, const std::string& key);

}  // namespace tessera
