#pragma once
// Collective in flight over gloo, and cleanup if it is dropped without wait().
//
// c10d's work of a send or receive is the only owner of gloo's buffer. A connection stops for good at a message for, or
// a send from, a destroyed buffer. So a work that is destroyed before wait() leaves its transfers to its group.

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "comm/backend/collective_call.h"
#include "comm/backend/group_backend.h"
#include "comm/gloo/gloo_notes.h"
#include "comm/gloo/gloo_watch.h"

namespace tessera {

/// Transfers of one launch. The works keep the tensors that they read and write.
struct GlooTransfers {
  uint64_t launch = 0;      // this rank's count of the group's launches
  uint64_t collective = 0;  // its count of collectives, some of which have several launches
  bool with_all = false;    // a send to, and a receive from, every other rank
  /// Send or receive with a rank of the group; null once done.
  struct Transfer {
    c10::intrusive_ptr<c10d::Work> work;
    int peer = 0;
  };
  std::vector<Transfer> works = {};
};

/// Transfers of a group's works that were destroyed before wait(). Thread safety: any number of threads.
class DroppedTransfers {
 public:
  /// Moves `transfers` here.
  void keep(std::list<GlooTransfers>& transfers) noexcept;
  /// Frees transfers of launches before `launch`, whose own transfers were with all ranks and are done. Connections
  /// move bytes in order of launches, so earlier ones are done as well. (c10d cannot be asked without waiting.)
  void free_before(uint64_t launch);

 private:
  std::mutex mutex_;
  std::list<GlooTransfers> kept_;  // a list, so that keep() does not allocate
};

/// State that a group shares with its works, which may outlive it.
struct GlooShared {
  GlooShared(c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<c10::intrusive_ptr<c10d::Work>> probes,
             std::vector<HostProcess> members)
      : notes(std::move(store)), watch(rank, std::move(probes), std::move(members)) {}

  DroppedTransfers dropped;
  const GlooNotes notes;
  GlooWatch watch;
};

/// Work of a collective. Thread safety: one thread at a time, except for give_up().
class GlooWork final : public c10d::Work {
 public:
  /// Takes one launch's transfers; `finish`, if any, runs once they are done.
  GlooWork(CollectiveSignature call, std::shared_ptr<const GroupInfo> info, std::shared_ptr<GlooShared> shared,
           std::list<GlooTransfers> transfers, std::function<void()> finish);
  ~GlooWork() override;

  /// Waits for the transfers. Throws gloo's errors as CommError, naming ranks of this host that have died, or the
  /// peer's call if it differed and failed too.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  /// Changed only by wait().
  bool isCompleted() override { return transfers_.empty(); }
  bool isSuccess() const override { return transfers_.empty(); }

  /// Makes wait(), even a running one, throw that the group was destroyed. May be called from any thread.
  void give_up() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  /// Returns false if it was interrupted.
  bool wait_once(GlooTransfers::Transfer& transfer, Clock::time_point deadline);
  /// Throws if an unfinished transfer is with a rank that is gone.
  void look_for_lost(Clock::time_point deadline);
  [[noreturn]] void raise(const std::exception& failure, int peer) const;
  void interrupt() noexcept;

  const CollectiveSignature call_;
  const std::shared_ptr<const GroupInfo> info_;
  const std::shared_ptr<GlooShared> shared_;
  std::mutex mutex_;                    // guards which transfers exist, and the next one too
  std::list<GlooTransfers> transfers_;  // until they are done
  bool is_given_up_ = false;
  std::function<void()> finish_;
};

}  // namespace tessera
