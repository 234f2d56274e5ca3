#pragma once
// Which host a rank's process is on, and whether it still runs.

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace tessera {

/// Number and start time together name a process for good: numbers are used again.
struct HostProcess {
  /// Equal for processes that can open each other's files through /proc: same boot, pid namespace and user. "": cannot
  /// be told.
  std::string host = {};
  int pid = 0;
  uint64_t start_time = 0;

  bool operator==(const HostProcess&) const = default;
};

HostProcess this_process();

/// As the store has it: pid, start time, host. What follows in the text is left alone. Throws ValueError for a text
/// that is none of this library's.
std::string to_text(const HostProcess& process);
HostProcess parse_process(const std::string& text);

/// Whether a process of this host runs; one that has ended but was not yet waited for does not. Where /proc cannot be
/// read, for want of a file descriptor say, one with its number does.
bool is_running(const HostProcess& process);

/// Returns true if `process` is on the host of `own` and runs no more; false also where that cannot be known.
bool has_died(const HostProcess& process, const HostProcess& own);

/// The processes of all ranks, through the store; every rank calls it. Throws what the store throws at a time-out, and
/// ValueError for an entry that is none of this library's.
std::vector<HostProcess> exchange_processes(c10d::Store& store, int rank, int world_size);

/// Whether these ranks are on one host.
bool share_host(const std::vector<HostProcess>& processes, const std::vector<int64_t>& ranks);

}  // namespace tessera
