#pragma once
// Starts N ranks of this program on this machine, for a main() that needs no launcher of its own:
//
//   int main(int argc, char** argv) {
//     // parse --nproc ...
//     if (nproc > 1 && !launched_as_rank()) {         // not under torchrun, mpirun, srun
//       return launch_local({.nproc = nproc});      // runs this program nproc times, with the same arguments
//     }
//     init_process_group();                         // in each of them
//   }
//
// Every rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR=127.0.0.1, MASTER_PORT, a
// TESSERA_JOB_ID of their own, a random TESSERA_JOB_SECRET unless that is set (SECURITY.md), and
// OMP_NUM_THREADS = cores / nproc unless that is set. Unless glibc's malloc is tuned by a variable already (malloc(3)),
// MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ let a rank keep up to 64 MiB of free heap, which sharded steps
// would otherwise give back and take again (docs/profiles.md). SIGINT and SIGTERM to the launcher go to all ranks. When
// a rank ends with a failure, the others get SIGTERM, and SIGKILL 3 s later. Ranks end with the launcher, even if it is
// killed.

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

struct LaunchOptions {
  int nproc = 1;
  /// The command; none: this program with its own arguments.
  std::vector<std::string> argv = {};
  /// Further variables for every rank; they win over those above.
  std::vector<std::pair<std::string, std::string>> environment = {};
  /// Files for output and errors, one a rank. None: ranks write where the launcher does.
  std::vector<std::string> output_files = {};
  /// How long ranks may go on after a SIGINT or SIGTERM, which they get too, until they are killed.
  std::chrono::milliseconds stop_grace = std::chrono::seconds(3);
};

struct LaunchResult {
  /// 0 if all ranks returned 0; else that of the rank that failed first, 128 + n where signal n ended it. After SIGINT
  /// or SIGTERM to the launcher 128 + that signal.
  int exit_code = 0;
  /// "" or what happened: "rank 1 (pid 4711) ended with exit code 3; stopping the other 2 rank(s)".
  std::string message = {};
};

/// Returns when all ranks have ended. Throws ValueError (nproc < 1, a number of files that is not nproc, a
/// TESSERA_JOB_SECRET of less than 16 characters), Error where the system refuses a process. Thread safety: one call at
/// a time; call it before other threads start, since it handles the process's signals while it runs.
LaunchResult launch_ranks(const LaunchOptions& options);

/// launch_ranks, with the message on stderr; returns the exit code.
int launch_local(const LaunchOptions& options);

/// Returns true in a rank of this launcher, torchrun, mpirun, mpiexec or srun. Throws as is_launched
/// (comm/launch/rank_environment.h), which it calls for the process's own environment.
bool launched_as_rank();

}  // namespace tessera
