#pragma once
// Which backend a group of ranks takes that are processes: shared memory where they share a host, TCP across
// hosts, and both where several hosts have several each.

#include <optional>
#include <string>
#include <vector>

#include "comm/launch/host_layout.h"
#include "comm/launch/host_process.h"
#include "comm/process_group.h"

namespace tessera {

/// What the environment variable TESSERA_CPU_BACKEND asks for where the program leaves the choice: "shm", "gloo" or "".
/// Throws ValueError for anything else.
std::string backend_from_environment();

/// Where the ranks of the default group run, if a group may come to share memory; otherwise none. Every rank calls it;
/// `key` is for this use of the store alone. Throws CommError (a rank does not come), ValueError ("shm" was asked for,
/// and the ranks do not share a host).
std::vector<HostProcess> find_processes(const ProcessGroupOptions& options, const std::string& key);

/// The hosts of `ranks` as a layout, if a hierarchical backend suits them.
std::optional<HostLayout> host_layout_of(const std::vector<HostProcess>& processes, const std::vector<int64_t>& ranks);

/// The backend that was asked for, or what suits `ranks`.
std::string backend_for_group(const ProcessGroupOptions& options, const std::vector<HostProcess>& processes,
                              const std::vector<int64_t>& ranks);

}  // namespace tessera
