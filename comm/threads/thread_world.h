#pragma once
// What ranks that are threads of one process share: where they meet, and how they learn that one of them is gone.
//
//   auto world = std::make_shared<ThreadWorld>(4);
//   // in the thread of rank r, in a rank context of its own:
//   init_process_group({.backend = "threads", .rank = r, .world_size = 4, .thread_world = world});
//   ...
//   world->leave(r);               // or world->abort(r, "what went wrong")
//
// testing/run_ranks.h does this for tests.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/backend/collective_call.h"
#include "comm/backend/group_backend.h"
#include "comm/backend/stream_event.h"

namespace tessera {

class ThreadWorld;

/// The meeting place of one group, or of the two ranks of a message. Each rank's k-th call meets the others' k-th call;
/// calls do not wait, so that several may be in flight. Thread safety: each rank from one thread at a time.
class ThreadGroup {
 public:
  /// One collective; done when all ranks have called and it is carried out.
  struct PendingCollective {
    PendingCollective() = default;
    PendingCollective(const PendingCollective&) = delete;
    PendingCollective& operator=(const PendingCollective&) = delete;
    /// Waits for the device where a rank did not wait for its call, whose tensors end here.
    ~PendingCollective();

    std::vector<CollectiveCall> calls;
    std::vector<bool> arrived;
    std::vector<StreamEvent> ready;  // where each rank's stream was when it brought its call
    StreamEvent carried_out;         // in the group's stream
    int missing = 0;
    bool done = false;
    std::string error;
  };
  using PendingCollectivePtr = std::shared_ptr<PendingCollective>;

  ThreadGroup(std::shared_ptr<ThreadWorld> world, std::vector<int64_t> ranks);

  /// Where messages go from one rank to another: a meeting place of `pair.from` and `pair.to`, in this order. Whoever
  /// comes first makes it, and nobody waits. May be called from any thread.
  std::shared_ptr<ThreadGroup> messages(RankPair pair);

  /// Brings the call of the rank at `place`, which `info` is of; the rank that completes the meeting carries it out.
  /// Throws CommError if a rank has failed.
  PendingCollectivePtr post(const GroupInfo& info, int place, CollectiveCall call);
  /// Returns when the call is carried out; on a device with streams, when it was given to one for which the calling
  /// thread's current stream waits. Throws CommError: ranks called different collectives, a missing rank has left or
  /// failed, or time is up, which fails this rank for all others as well.
  void wait(const GroupInfo& info, int place, const PendingCollectivePtr& meeting, std::chrono::milliseconds timeout);
  /// Whether wait() would return or throw at once.
  enum class State { Open, Done, Failed };
  State state_of(const PendingCollective& meeting) const;

 private:
  friend class ThreadWorld;

  std::vector<int64_t> missing_ranks(const PendingCollective& meeting) const;
  /// Whether a missing rank will not come. With the world's mutex held.
  bool is_hopeless(const PendingCollective& meeting) const;
  void finish(PendingCollective& meeting);
  void carry_out(PendingCollective& meeting);

  const std::shared_ptr<ThreadWorld> world_;
  const std::vector<int64_t> ranks_;
  std::condition_variable changed_;
  std::deque<PendingCollectivePtr> open_;
  uint64_t first_open_ = 0;
  std::vector<uint64_t> calls_made_;
  std::map<RankPair, std::shared_ptr<ThreadGroup>> messages_;
  std::optional<c10::Stream> stream_;  // for whoever carries a call out, one at a time
};

/// Thread safety: all calls may come from any thread.
class ThreadWorld : public std::enable_shared_from_this<ThreadWorld> {
 public:
  explicit ThreadWorld(int size);

  int size() const { return static_cast<int>(left_.size()); }

  /// The rank takes part no more; ranks that wait for it fail, the others go on.
  void leave(int64_t rank);
  /// The rank failed: every rank that waits, or calls a collective from now on, fails. The first failure is kept.
  void abort(int64_t rank, const std::string& reason);

  /// The meeting place named `key`; each of `ranks` asks for it once.
  std::shared_ptr<ThreadGroup> join(const std::string& key, const std::vector<int64_t>& ranks);

 private:
  friend class ThreadGroup;

  struct Joining {
    std::weak_ptr<ThreadGroup> group;
    size_t joined = 0;
  };

  // With the mutex held.
  void fail(int64_t rank, const std::string& reason);
  std::shared_ptr<ThreadGroup> make_group(const std::vector<int64_t>& ranks);
  void notify_all_groups();

  std::mutex mutex_;  // guards all state of the world and of its groups
  std::vector<bool> left_;
  std::string failure_;
  std::map<std::string, Joining> joining_;
  std::vector<std::weak_ptr<ThreadGroup>> groups_;
};

}  // namespace tessera
