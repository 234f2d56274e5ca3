#pragma once
// Identifies the processes of ranks, and finds out whether they still run.

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace tessera {

struct HostProcess {
  std::string host = {};  // boot, pid namespace and user, which /proc access to each other needs; "" if unknown
  int pid = 0;
  uint64_t start_time = 0;  // identifies the process together with `pid`, since pids are reused

  bool operator==(const HostProcess&) const = default;
};

HostProcess this_process();

std::string to_text(const HostProcess& process);     // for the store: "pid start_time host"
HostProcess parse_process(const std::string& text);  // ignores text that follows; ValueError for other text

/// Returns whether a process of this host runs; zombies do not. Without /proc, any process with that pid counts.
bool is_running(const HostProcess& process);

bool has_died(const HostProcess& process, const HostProcess& own);  // false for other hosts, or if unknown

/// Returns the processes of all ranks. All must call it. Throws the store's errors, and ValueError for a bad entry.
std::vector<HostProcess> exchange_processes(c10d::Store& store, int rank, int world_size);

/// Returns whether these ranks are on one host.
bool share_host(const std::vector<HostProcess>& processes, const std::vector<int64_t>& ranks);

}  // namespace tessera
