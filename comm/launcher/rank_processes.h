#pragma once
// RankProcesses: the processes of a launch, one for each rank.

#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>

#include "comm/launch/regroup.h"

namespace tessera {

constexpr int kCannotRunExitCode = 126, kNotFoundExitCode = 127;  // like a shell

/// A program, as execve() takes it.
struct RankProgram {
  const char* path;
  char** argv;
  char** environment;
  const char* output_file;  // or null
  bool appends;             // to the file
  int listen_descriptor;    // or -1
  const sigset_t* signals;
  pid_t launcher;
};

/// Outcome of one start.
struct StartEnd {
  int exit_code = 0;                            // as in LaunchResult
  std::string failure;                          // of the first to fail
  std::string flights = {};                     // as in LaunchResult
  int failed_rank = -1;                         // or -1
  std::chrono::steady_clock::duration lived{};  // its time from its start
  size_t others = 0;                            // that ran when it was seen
  bool is_stopped = false;                      // by a signal to the launcher
};

/// Kills and awaits the remaining processes in its destructor. Thread safety: one thread at a time.
class RankProcesses {
 public:
  using Clock = std::chrono::steady_clock;

  RankProcesses() = default;
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;
  ~RankProcesses();

  /// Throws Error if the system refuses a process.
  void start(const Seat& seat, const RankProgram& program);

  bool empty() const { return running_.empty(); }
  bool has(int rank) const;
  void send(int signal) const;

  /// Collects the ranks that have ended, up to those of `last_start`, and notes the first failure. A rank that another
  /// part of the program has waited for counts as failed, since its status is unknown. With `prefers_signals`, a rank
  /// that was ended by a signal counts as the first failure, and so does any that ended before those that only left
  /// their groups.
  void reap(StartEnd& end, int last_start, bool prefers_signals);
  /// Notes the ranks of a start that have left their groups. The first one is the failure, until one is found that has
  /// ended.
  void find_left(RegroupStore& store, int start, StartEnd& end);
  bool all_left(int start) const;
  /// Kills the ranks of a start that have not left their groups.
  void kill_late(StartEnd& end, int start) const;
  /// Gives each rank that has left a start its rank in the next one: the same if it is below next.ranks.
  void reseat(RegroupStore& store, const Seat& next);

 private:
  struct Process {
    int rank = 0;
    int start = 0;  // in which it takes part
    Clock::time_point began = {};
    bool has_left = false;  // its groups, and waits for the next start
  };

  static bool is_in_groups(const Process& process, int start) { return process.start == start && !process.has_left; }
  void note_failed(const Process& process, StartEnd& end) const;

  std::map<pid_t, Process> running_;
};

}  // namespace tessera
