#include "comm/launcher/rank_processes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/error.h"

namespace tessera {

namespace {

[[noreturn]] void stop(std::string_view text, int exit_code) {
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
  _exit(exit_code);
}

// Runs in the child between fork and exec, where only async-signal-safe calls are allowed.
[[noreturn]] void become(const RankProgram& program) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != program.launcher) {
    _exit(1);
  }
  if (program.output_file != nullptr) {
    const int file = open(program.output_file, O_WRONLY | O_CREAT | (program.appends ? O_APPEND : O_TRUNC), 0600);
    if (file < 0) {
      stop("launch_local: an output file could not be opened\n", kCannotRunExitCode);
    }
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    if (file > STDERR_FILENO) {
      close(file);
    }
  }
  if (program.listen_descriptor >= 0) {
    fcntl(program.listen_descriptor, F_SETFD, 0);
  }
  pthread_sigmask(SIG_SETMASK, program.signals, nullptr);
  execve(program.path, program.argv, program.environment);
  stop("launch_local: the program could not be started\n", kNotFoundExitCode);
}

/// Describes how a process ended. `status` is that of waitpid(), if known.
std::string describe_end(std::optional<int> status) {
  if (!status) {
    return "ended with unknown status";
  }
  return WIFSIGNALED(*status)
             ? fmt::format("was killed by signal {} ({})", WTERMSIG(*status), strsignal(WTERMSIG(*status)))
             : fmt::format("ended with exit code {}", WEXITSTATUS(*status));
}

int to_exit_code(std::optional<int> status) {
  return !status ? 1 : WIFSIGNALED(*status) ? 128 + WTERMSIG(*status) : WEXITSTATUS(*status);
}

}  // namespace

RankProcesses::~RankProcesses() {
  send(SIGKILL);
  for (const auto& [pid, process] : running_) {
    waitpid(pid, nullptr, 0);
  }
}

void RankProcesses::start(const Seat& seat, const RankProgram& program) {
  const pid_t pid = fork();
  TESSERA_CHECK(Error, pid >= 0, "launch_local: rank {} could not be started: {}", seat.rank, std::strerror(errno));
  if (pid == 0) {
    become(program);
  }
  running_[pid] = {.rank = seat.rank, .start = seat.start, .began = Clock::now()};
}

bool RankProcesses::has(int rank) const {
  return std::ranges::any_of(running_, [&](const auto& entry) { return entry.second.rank == rank; });
}

void RankProcesses::send(int signal) const {
  for (const auto& [pid, process] : running_) {
    kill(pid, signal);
  }
}

void RankProcesses::reap(StartEnd& end, int last_start, bool prefers_signals) {
  for (auto entry = running_.begin(); entry != running_.end();) {
    int word = 0;
    const auto [pid, process] = *entry;
    const pid_t ended = process.start > last_start ? 0 : waitpid(pid, &word, WNOHANG);
    if (ended == 0) {
      ++entry;
      continue;
    }
    const std::optional<int> status = ended > 0 ? std::optional(word) : std::nullopt;
    entry = running_.erase(entry);
    const bool is_signaled = status && WIFSIGNALED(*status);
    const bool is_preferred = end.failed_rank < 0 || (is_signaled && end.exit_code < 128);
    if (status != 0 && (end.exit_code == 0 || (prefers_signals && is_preferred))) {
      end.exit_code = to_exit_code(status);
      end.failure = fmt::format("rank {} (pid {}) {}", process.rank, pid, describe_end(status));
      note_failed(process, end);
    }
  }
}

void RankProcesses::find_left(RegroupStore& store, int start, StartEnd& end) {
  for (auto& [pid, process] : running_) {
    if (process.start != start || process.has_left) {
      continue;
    }
    if (const auto why = store.find_left(start, process.rank)) {
      process.has_left = true;
      if (end.exit_code == 0) {
        end.exit_code = 1;
        end.failure = fmt::format("rank {} (pid {}) has left its groups: {}", process.rank, pid, *why);
        end.others = running_.size() - 1;
      }
    }
  }
}

bool RankProcesses::all_left(int start) const {
  return std::ranges::all_of(running_, [&](const auto& entry) { return !is_in_groups(entry.second, start); });
}

void RankProcesses::kill_late(StartEnd& end, int start) const {
  for (const auto& [pid, process] : running_) {
    if (is_in_groups(process, start)) {
      kill(pid, SIGKILL);
      if (end.failed_rank < 0) {
        end.exit_code = 128 + SIGKILL;
        end.failure =
            fmt::format("rank {} (pid {}) was killed, as it did not leave its groups in time", process.rank, pid);
        note_failed(process, end);
      }
    }
  }
}

void RankProcesses::reseat(RegroupStore& store, const Seat& next) {
  int free = 0;
  for (auto& [pid, process] : running_) {
    if (process.start == next.start) {
      continue;
    }
    const int before = process.rank;
    while (process.rank >= next.ranks) {
      process.rank = has(free) ? process.rank : free;
      ++free;
    }
    store.give_seat(process.start, before, {.start = next.start, .rank = process.rank, .ranks = next.ranks});
    process.start = next.start;
    process.has_left = false;
  }
}

void RankProcesses::note_failed(const Process& process, StartEnd& end) const {
  end.failed_rank = process.rank;
  end.lived = Clock::now() - process.began;
  end.others = running_.size();
}

}  // namespace tessera
