#pragma once
// One rank's end of an "shm" group, or of the messages between two of its ranks: launch, wait, and detection of lost
// ranks.

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/backend/group_backend.h"
#include "comm/launch/host_process.h"
#include "comm/shm/shm_arena.h"
#include "comm/shm/shm_queue.h"

namespace tessera {

/// A group that lets callers wait for works in any order, also across groups. A waiting rank also advances the calls of
/// its other groups. A rank that fails, for example by a timeout, fails the group's other ranks; every later call of a
/// failed group fails.
/// Thread safety: calls from one thread at a time; other groups may be used by other threads.
class ShmGroup {
 public:
  /// `processes` are the group's ranks, in order. `spins`: wait actively before sleeping, which pays off if each rank
  /// has a core.
  ShmGroup(std::shared_ptr<const GroupInfo> info, ShmArena arena, std::vector<HostProcess> processes, bool spins);
  /// Makes the end for messages of `pair`, which includes this rank, within `whole`, with a separate sequence. Does not
  /// wait. Fails if `whole` has failed, and fails `whole` on timeout. Throws CommError if the memory cannot be mapped.
  ShmGroup(std::shared_ptr<ShmGroup> whole, RankPair pair);
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;
  /// Fails peers that wait for a call that this rank has not made. Waits until peers have read this rank's inputs in
  /// place, up to the timeout, unless an exception unwinds. In a child after fork(), only unmaps the memory.
  ~ShmGroup();

  /// Returns the call's number. Throws CommError if the group has failed.
  uint64_t launch(CollectiveCall call);
  /// Progress of a call: this rank has its output, or peers have also read its input (comm/shm/shm_queue.h).
  enum class Stage { Done, Read };
  bool has_reached(uint64_t number, Stage stage);
  /// Returns whether wait() would return or throw at once.
  bool is_over(uint64_t number, Stage stage);
  /// Waits until the call has reached `stage`; a `timeout` of 0 is the group's. Throws CommError if ranks made
  /// different calls, a missing rank died, left or failed, or on timeout.
  void wait(uint64_t number, Stage stage, std::chrono::milliseconds timeout);

 private:
  using Clock = std::chrono::steady_clock;

  /// Ranks of the group that share an arena, in its order, and this rank among them.
  struct Members {
    std::vector<int> ranks = {};
    int own = 0;
  };

  ShmGroup(std::shared_ptr<const GroupInfo> info, std::shared_ptr<ShmGroup> whole, ShmArena arena, Members members,
           std::vector<HostProcess> processes, int spins);
  static Members all_members(const GroupInfo& info);
  /// Returns the arena in which failures and leaving ranks are recorded.
  ShmArena& whole_arena() { return whole_ ? whole_->arena_ : arena_; }
  bool is_at(uint64_t number, Stage stage) const {
    return stage == Stage::Read ? queue_.is_read(number) : queue_.is_done(number);
  }
  void sleep(std::unique_lock<std::mutex>& lock);
  /// Waits until peers have read this rank's inputs in place. Without waiting, or on timeout, they get an error.
  void end_zero_copy() noexcept;
  bool has_left(int peer) { return whole_arena().control(members_.ranks[peer]).left.load() != 0; }
  template <class IsGone>
  std::vector<int> missing_who(IsGone is_gone);
  /// Returns why missing data will not arrive, or "" if it still may.
  std::string find_fault(Clock::time_point now);
  [[noreturn]] void time_out(uint64_t number, std::chrono::milliseconds timeout);
  /// Records a failure for the group's other ranks.
  void record(uint64_t number, const std::string& reason);
  [[noreturn]] void raise(uint64_t number, const std::string& reason);
  bool advance_other_groups();
  std::string global_ranks(const std::vector<int>& places) const;

  const std::shared_ptr<const GroupInfo> info_;
  const std::shared_ptr<ShmGroup> whole_;  // null unless this is for messages
  ShmArena arena_;
  const Members members_;
  const std::vector<HostProcess> processes_;  // of the members
  const int process_;                         // index of this process
  const int spins_;
  std::mutex mutex_;  // guards the following members
  ShmQueue queue_;
  std::string failure_;
  Clock::time_point next_look_{};
};

}  // namespace tessera
