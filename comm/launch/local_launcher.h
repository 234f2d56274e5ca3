#pragma once
// Starts N ranks of this program on this host, without another launcher.
//
//   if (nproc > 1 && !launched_as_rank()) return launch_local({.nproc = nproc});  // runs this program nproc times
//   return report_errors(run_rank);                                               // in each rank
//
// Ranks get torchrun's variables and some more (docs/semantics.md). If a rank fails, the others get SIGTERM, and
// SIGKILL 3 s later. SIGINT and SIGTERM are passed on. Ranks end with the launcher, even if it is killed.

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

struct LaunchOptions {
  int nproc = 1;
  std::vector<std::string> argv = {};  // command; default: this program with its arguments
  std::vector<std::pair<std::string, std::string>> environment = {};  // additional variables, which take precedence
  std::vector<std::string> output_files = {};  // one per rank, for stdout and stderr; default: the launcher's
  std::chrono::milliseconds stop_grace = std::chrono::seconds(3);  // from SIGINT or SIGTERM to SIGKILL
};

struct LaunchResult {
  /// 0 if all ranks returned 0, else that of the first to fail. 128 + n for signal n to it or to the launcher.
  int exit_code = 0;
  std::string message = {};  // such as "rank 1 (pid 4711) ended with exit code 3; stopping the other 2 rank(s)"
};

/// Runs the ranks until all have ended. Throws:
/// - ValueError for `nproc < 1`, a number of files other than nproc, or a TESSERA_JOB_SECRET of fewer than 16
///   characters.
/// - Error if the system refuses a process.
/// Thread safety: one call at a time, before other threads start, since it handles the process's signals.
LaunchResult launch_ranks(const LaunchOptions& options);

int launch_local(const LaunchOptions& options);  // runs launch_ranks(), prints the message and returns the exit code

bool launched_as_rank();  // is_launched() for this process (comm/launch/rank_environment.h)

/// Runs a rank's `program` and returns 0. Prints an exception as "rank 1: its text" on stderr, without libtorch's stack
/// frames, and returns 1.
int report_errors(const std::function<void()>& program);

}  // namespace tessera
