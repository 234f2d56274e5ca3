#pragma once
// A process group with the backends that suit its ranks; internal to comm.

#include <string>
#include <vector>

#include "comm/group_backend.h"
#include "comm/host_process.h"
#include "comm/nccl_options.h"
#include "comm/process_group.h"

namespace tessera {

/// How the ranks of the default group use their GPUs; kept in the rank context (rank_local).
struct NcclUse {
  bool enabled = false;
  int device = 0;
  NcclOptions options = {};
};

/// What groups are made from.
struct GroupSource {
  /// As resolved by init_process_group; `backend` is the CPU's, "" if each group chooses, BackendSpec::kNone.
  const ProcessGroupOptions& options;
  const std::vector<HostProcess>& processes;
  const NcclUse& nccl;
};

/// Every member calls it, with the same `key`, which no other group has.
ProcessGroupPtr make_group(const GroupSource& source, GroupInfo info, const std::string& key);

}  // namespace tessera
