#pragma once
// Starts N ranks of this program on this host, without another launcher.
//
//   if (nproc > 1 && !launched_as_rank()) return launch_local({.nproc = nproc});  // runs this program nproc times
//   return report_errors(run_rank);                                               // in each rank
//
// Ranks get torchrun's variables and some more (docs/semantics.md). If a rank fails, the others get SIGTERM, and
// SIGKILL 3 s later, or immediately before a restart. SIGINT and SIGTERM are forwarded. Ranks end with the launcher,
// even if it is killed.

#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

struct LaunchOptions {
  int nproc = 1;
  int max_restarts = 0;                // number of restarts after failures
  int min_ranks = 0;                   // restarts may use fewer ranks, but at least this number; 0: nproc
  bool keep_survivors = false;         // restarts start processes only for lost ranks (comm/run_elastic.h)
  std::vector<std::string> argv = {};  // command; default: this program with its arguments
  std::vector<std::pair<std::string, std::string>> environment = {};  // additional variables, which take precedence
  std::vector<std::string> output_files = {};  // one per rank, for stdout and stderr; default: the launcher's
  std::chrono::milliseconds stop_grace = std::chrono::seconds(3);  // from SIGINT or SIGTERM to SIGKILL
  std::chrono::milliseconds start_time = std::chrono::minutes(1);  // earlier failures count as failures at startup
  std::chrono::milliseconds regroup_timeout = std::chrono::seconds(10);  // survivors that take longer are replaced
};

/// Exit code of a rank that failed with a user error, such as an invalid option. Never restarted.
constexpr int kUserErrorExitCode = 2;

struct LaunchResult {
  /// 0 if all ranks returned 0, otherwise that of the first to fail. 128 + n for signal n to it or to the launcher.
  int exit_code = 0;
  std::string flights = {};  // then one line per rank on what it waits for (comm/launcher/flight_report.h), or ""
  std::string message = {};  // such as "rank 1 (pid 4711) ended with exit code 3; stopping the other 2 rank(s)"
  int restarts = 0;
  int nproc = 0;  // ranks of the last start
};

/// Runs the ranks until all have ended. Restarts them after failures while restarts are left, and prints a line each
/// time. docs/reliability.md describes when fewer ranks start, and which failures are final. Throws:
/// - ValueError for `nproc < 1`, a `max_restarts` or `min_ranks` out of range, a number of files other than nproc, or a
///   TESSERA_JOB_SECRET of fewer than 16 characters.
/// - Error if the system refuses a process.
/// Thread safety: one call at a time, before other threads start, since it handles the process's signals.
LaunchResult launch_ranks(const LaunchOptions& options);

int launch_local(const LaunchOptions& options);  // runs launch_ranks(), prints the message and returns the exit code

bool launched_as_rank();  // is_launched() for this process (comm/launch/rank_environment.h)

/// Returns how many times torchrun or this launcher has restarted the ranks. Throws ValueError for a
/// TORCHELASTIC_RESTART_COUNT that is not a number.
int restart_count();

/// Returns the in-memory folder that the ranks of a job share across restarts. launch_ranks() creates it in
/// TESSERA_MEMORY_DIR, or in /dev/shm, and removes it. Under another launcher, it is TESSERA_MEMORY_DIR itself; "" if
/// not set.
std::string job_memory_folder();

/// Returns kUserErrorExitCode for ValueError, KeyError, NotImplementedError and StateError, and 1 for others.
int error_exit_code(const std::exception& error);

/// Runs a rank's `program` and returns 0. Prints an exception as "rank 1: its text" on stderr, without libtorch's stack
/// frames, and returns its error_exit_code().
int report_errors(const std::function<void()>& program);

}  // namespace tessera
