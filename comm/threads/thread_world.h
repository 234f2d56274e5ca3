#pragma once
// State that ranks share if they are threads of one process: where they meet, and which of them are gone.
//
//   auto world = std::make_shared<ThreadWorld>(4);
//   // in the thread of rank r, in its own rank context:
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

/// Rendezvous of one group, or of the two ranks of a message. Each rank's k-th call meets the others' k-th call;
/// calls do not wait, so several may be in flight. Thread safety: one thread at a time per rank.
class ThreadGroup {
 public:
  /// One collective; done when all ranks have called and it is executed.
  struct PendingCollective {
    PendingCollective() = default;
    PendingCollective(const PendingCollective&) = delete;
    PendingCollective& operator=(const PendingCollective&) = delete;
    /// Waits for the device if a rank did not wait for its call, because this frees the call's tensors.
    ~PendingCollective();

    std::vector<CollectiveCall> calls;
    std::vector<bool> arrived;
    std::vector<StreamEvent> ready;  // streams of the ranks when they posted their call
    StreamEvent carried_out;         // in the group's stream
    int missing = 0;
    bool done = false;
    std::string error;
  };
  using PendingCollectivePtr = std::shared_ptr<PendingCollective>;

  ThreadGroup(std::shared_ptr<ThreadWorld> world, std::vector<int64_t> ranks);

  /// Returns the group of `pair.from` and `pair.to`, in this order. The first caller makes it, without waiting.
  /// May be called from any thread.
  std::shared_ptr<ThreadGroup> messages(RankPair pair);

  /// Posts the call of the rank at `place`, described by `info`; the last rank executes it. Throws CommError if a rank
  /// has failed.
  PendingCollectivePtr post(const GroupInfo& info, int place, CollectiveCall call);
  /// Returns when the call is executed or, on a device with streams, when the current stream waits for it. Throws
  /// CommError if ranks made different calls, a missing rank has left or failed, or on timeout, which fails this rank
  /// for all others.
  void wait(const GroupInfo& info, int place, const PendingCollectivePtr& pending, std::chrono::milliseconds timeout);
  /// State of a call: whether wait() would return or throw at once.
  enum class State { Open, Done, Failed };
  State state(const PendingCollective& pending) const;

 private:
  friend class ThreadWorld;

  std::vector<int64_t> missing_ranks(const PendingCollective& pending) const;
  /// Returns whether a missing rank will not come. Requires the world's mutex.
  bool is_hopeless(const PendingCollective& pending) const;
  void finish(PendingCollective& pending);
  void carry_out(PendingCollective& pending);

  const std::shared_ptr<ThreadWorld> world_;
  const std::vector<int64_t> ranks_;
  std::condition_variable changed_;
  std::deque<PendingCollectivePtr> open_;
  uint64_t first_open_ = 0;
  std::vector<uint64_t> calls_made_;
  std::map<RankPair, std::shared_ptr<ThreadGroup>> messages_;
  std::optional<c10::Stream> stream_;  // for the thread that executes a call, one at a time
};

/// Thread safety: any thread.
class ThreadWorld : public std::enable_shared_from_this<ThreadWorld> {
 public:
  explicit ThreadWorld(int size);

  int size() const { return static_cast<int>(left_.size()); }

  /// Removes the rank; ranks that wait for it fail, and others continue.
  void leave(int64_t rank);
  /// Marks the rank as failed: every rank that waits, or calls a collective from now on, fails. Keeps the first reason.
  void abort(int64_t rank, const std::string& reason);

  /// Returns the group named `key`; each of `ranks` requests it once.
  std::shared_ptr<ThreadGroup> join(const std::string& key, const std::vector<int64_t>& ranks);

 private:
  friend class ThreadGroup;

  struct Joining {
    std::weak_ptr<ThreadGroup> group;
    size_t joined = 0;
  };

  // Functions that require the mutex.
  void fail(int64_t rank, const std::string& reason);
  std::shared_ptr<ThreadGroup> make_group(const std::vector<int64_t>& ranks);
  void notify_all_groups();

  std::mutex mutex_;  // guards all state of the world and its groups
  std::vector<bool> left_;
  std::string failure_;
  std::map<std::string, Joining> joining_;
  std::vector<std::weak_ptr<ThreadGroup>> groups_;
};

}  // namespace tessera
