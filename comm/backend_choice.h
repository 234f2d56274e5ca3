#pragma once
// Chooses a backend by where ranks run: shared memory on one host, TCP across hosts, or both.

#include <optional>
#include <string>
#include <vector>

#include "comm/launch/host_layout.h"
#include "comm/launch/host_process.h"
#include "comm/process_group.h"

namespace tessera {

/// Returns TESSERA_CPU_BACKEND: "shm", "gloo" or "". Throws ValueError for other values.
std::string backend_from_environment();

/// Returns where all ranks run, or nothing if they cannot share memory. `key` is used once. Throws CommError if a rank
/// is missing, and ValueError for "shm" across hosts.
std::vector<HostProcess> find_processes(const ProcessGroupOptions& options, const std::string& key);

/// Returns the hosts of `ranks`, if the "hierarchical" backend suits them.
std::optional<HostLayout> hierarchical_layout(const std::vector<HostProcess>& processes,
                                              const std::vector<int64_t>& ranks);

/// Returns the requested backend, or the one that suits `ranks`.
std::string backend_for_group(const ProcessGroupOptions& options, const std::vector<HostProcess>& processes,
                              const std::vector<int64_t>& ranks);

}  // namespace tessera
