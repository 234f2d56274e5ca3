#include "comm/launch/host_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "comm/launch/store.h"

namespace tessera {

namespace {

/// Contents of /proc/<pid>/stat.
struct ProcessStatus {
  enum class Source { Read, NoProcess, Unreadable };
  Source source = Source::Read;
  char state = 'X';
  uint64_t start_time = 0;
};

/// Returns the status after a failed read, which also happens for a running process, for example without a free
/// descriptor.
ProcessStatus unread() {
  using Source = ProcessStatus::Source;
  return {.source = errno == ENOENT || errno == ESRCH ? Source::NoProcess : Source::Unreadable};
}

// A program's name is in parentheses and may contain spaces.
ProcessStatus parse_status(const std::string& line) {
  constexpr int kFieldsBetween = 18;  // between the state and the start time, fields 3 and 22
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) {
    return {.source = ProcessStatus::Source::Unreadable};
  }
  std::istringstream fields(line.substr(name_end + 1));
  ProcessStatus status;
  fields >> status.state;
  std::string skipped;
  for (int i = 0; i < kFieldsBetween; ++i) {
    fields >> skipped;
  }
  fields >> status.start_time;
  return status;
}

ProcessStatus read_status(int pid) {
  const int file = ::open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    return unread();
  }
  std::array<char, 2048> text;
  const ssize_t size = ::read(file, text.data(), text.size());
  const ProcessStatus status = size < 0 ? unread() : parse_status(std::string(text.data(), static_cast<size_t>(size)));
  ::close(file);
  return status;
}

std::string read_link(const char* path) {
  std::array<char, 128> target;
  const ssize_t size = readlink(path, target.data(), target.size());
  return size > 0 ? std::string(target.data(), size) : "";
}

std::string this_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const std::string pids = read_link("/proc/self/ns/pid");
  return boot.empty() || pids.empty() ? "" : fmt::format("{}/{}/{}", boot, pids, geteuid());
}

}  // namespace

HostProcess this_process() {
  return {.host = this_host(), .pid = getpid(), .start_time = read_status(getpid()).start_time};
}

bool is_running(const HostProcess& process) {
  const ProcessStatus status = read_status(process.pid);
  if (status.source == ProcessStatus::Source::Unreadable) {
    return kill(process.pid, 0) == 0 || errno != ESRCH;
  }
  return status.source == ProcessStatus::Source::Read && status.state != 'X' && status.state != 'Z' &&
         status.start_time == process.start_time;
}

bool has_died(const HostProcess& process, const HostProcess& own) {
  return !own.host.empty() && process.host == own.host && !is_running(process);
}

std::string to_text(const HostProcess& process) {
  return fmt::format("{} {} {}", process.pid, process.start_time, process.host);
}

HostProcess parse_process(const std::string& text) {
  std::istringstream fields(text);
  HostProcess process;
  fields >> process.pid >> process.start_time;
  TESSERA_CHECK(ValueError, !fields.fail() && process.pid > 0,
                "the store's entry \"{}\" names no process; give the ranks a store of their own", text);
  fields >> process.host;
  return process;
}

std::vector<HostProcess> exchange_processes(c10d::Store& store, int rank, int world_size) {
  std::vector<HostProcess> processes;
  for (const std::string& entry : exchange_texts(store, "process", rank, world_size, to_text(this_process()))) {
    processes.push_back(parse_process(entry));
  }
  return processes;
}

bool share_host(const std::vector<HostProcess>& processes, const std::vector<int64_t>& ranks) {
  const std::string& host = processes.at(ranks.at(0)).host;
  return !host.empty() && std::ranges::all_of(ranks, [&](int64_t rank) { return processes.at(rank).host == host; });
}

}  // namespace tessera
