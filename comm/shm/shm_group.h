#pragma once
// One rank's end of an "shm" group, or of the messages between two of its ranks: launch and wait, and how a rank learns
// that another is gone.

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

/// Works of a rank may be waited for in any order, also across groups: a rank that waits moves the calls of its other
/// groups along as well. A rank that fails, by a time-out, makes the group's other ranks fail too; once a group has
/// failed every further call does.
///
/// Thread safety: calls from one thread at a time; other groups may be used by other threads.
class ShmGroup {
 public:
  /// `processes`: of the group's ranks, in order. `spins`: whether to wait for a while before sleeping, which is good
  /// where every rank has a core.
  ShmGroup(std::shared_ptr<const GroupInfo> info, ShmArena arena, std::vector<HostProcess> processes, bool spins);
  /// Messages of `pair`, of which this rank is one, among the ranks of `whole`: calls of their own, in an order of
  /// their own. Waits for nobody. They fail where `whole` has failed; where a message is not done in time, `whole`
  /// fails. Throws CommError if the memory cannot be mapped.
  ShmGroup(std::shared_ptr<ShmGroup> whole, RankPair pair);
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;
  /// Peers that wait for a call which this rank has not made fail. Inputs that are lent go with the group, so it waits
  /// for who has yet to read one of a call that is done here, as long as a call may take; not while an exception
  /// unwinds. A child after fork(), for which the group is of no use, only unmaps its memory.
  ~ShmGroup();

  /// Returns the call's number. Throws CommError if the group has failed.
  uint64_t launch(CollectiveCall call);
  /// How far a call has come: this rank has its output; nobody reads its input any more, either, which is the same
  /// unless that is lent (comm/shm/shm_queue.h).
  enum class Stage { Done, Read };
  bool has_reached(uint64_t number, Stage stage);
  /// The same, or that it never will, since wait() would throw at once.
  bool is_over(uint64_t number, Stage stage);
  /// Returns when the call has reached `stage`; `timeout` 0: the group's. Throws CommError: the ranks called different
  /// collectives, a missing rank died, left or failed, or time is up.
  void wait(uint64_t number, Stage stage, std::chrono::milliseconds timeout);

 private:
  using Clock = std::chrono::steady_clock;

  /// Which of the group's ranks share an arena, in its order, and which of them this one is.
  struct Members {
    std::vector<int> ranks = {};
    int own = 0;
  };

  ShmGroup(std::shared_ptr<const GroupInfo> info, std::shared_ptr<ShmGroup> whole, ShmArena arena, Members members,
           std::vector<HostProcess> processes, int spins);
  static Members all_members(const GroupInfo& info);
  /// Where failures are recorded, and ranks that leave.
  ShmArena& whole_arena() { return whole_ ? whole_->arena_ : arena_; }
  bool is_at(uint64_t number, Stage stage) const {
    return stage == Stage::Read ? queue_.is_read(number) : queue_.is_done(number);
  }
  void sleep(std::unique_lock<std::mutex>& lock);
  /// Waits until peers have read what this rank has lent. If it may not wait, or the time is up, they have an error.
  void end_zero_copy() noexcept;
  bool has_left(int peer) { return whole_arena().control(members_.ranks[peer]).left.load() != 0; }
  template <class IsGone>
  std::vector<int> missing_who(IsGone is_gone);
  /// Why what is missing will not come; "" if it still may.
  std::string find_fault(Clock::time_point now);
  [[noreturn]] void time_out(uint64_t number, std::chrono::milliseconds timeout);
  /// For the group's other ranks.
  void record(uint64_t number, const std::string& reason);
  [[noreturn]] void raise(uint64_t number, const std::string& reason);
  bool advance_other_groups();
  std::string global_ranks(const std::vector<int>& places) const;

  const std::shared_ptr<const GroupInfo> info_;
  const std::shared_ptr<ShmGroup> whole_;  // null unless this is for messages
  ShmArena arena_;
  const Members members_;
  const std::vector<HostProcess> processes_;  // of the members
  const int process_;                         // this one's number
  const int spins_;
  std::mutex mutex_;  // guards what follows
  ShmQueue queue_;
  std::string failure_;
  Clock::time_point next_look_{};
};

}  // namespace tessera
