#pragma once
// A collective over gloo in flight, and what becomes of one that nobody waits for.
//
// c10d's work of a send or receive is the only owner of gloo's buffer, and gloo's connection to a peer cannot do
// without the buffers: it stops for good at a message that comes for one that is gone, and at a send of one that is
// gone, and all that follows on it waits. So a work that goes before it was waited for leaves its transfers to its
// group.

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

namespace tessera {

/// What a launch has asked gloo for. The works keep the tensors that they read and write.
struct GlooTransfers {
  /// This rank's count of its group's launches.
  uint64_t launch = 0;
  /// Its count of the group's collectives, of which some are launched in two rounds.
  uint64_t collective = 0;
  /// Whether they are a send to, and a receive from, every other rank.
  bool with_all = false;
  /// A send or receive, with which rank of the group; null where it is done.
  struct Transfer {
    c10::intrusive_ptr<c10d::Work> work;
    int peer = 0;
  };
  std::vector<Transfer> works = {};
};

/// The transfers of a group's works that went before they were waited for. Thread safety: any number of threads.
class DroppedTransfers {
 public:
  /// Takes over what is in the list, which is empty then.
  void keep(std::list<GlooTransfers>& transfers) noexcept;
  /// Frees those of launches before `launch`, whose own transfers are done and were with all ranks: a connection moves
  /// the bytes of launches in their order, so the earlier ones are done as well. (c10d cannot be asked without
  /// waiting.)
  void free_before(uint64_t launch);

 private:
  std::mutex mutex_;
  std::list<GlooTransfers> kept_;  // a list, so that nothing is allocated to keep one
};

/// State that a group shares with its works, which may outlive it.
struct GlooShared {
  explicit GlooShared(c10::intrusive_ptr<c10d::Store> store) : notes(std::move(store)) {}

  DroppedTransfers dropped;
  const GlooNotes notes;
};

/// Thread safety: for one thread at a time, but for give_up().
class GlooWork final : public c10d::Work {
 public:
  /// `transfers`: one launch's. `finish`: what is to be done once they are here, or empty.
  GlooWork(CollectiveSignature call, std::shared_ptr<const GroupInfo> info, std::shared_ptr<GlooShared> shared,
           std::list<GlooTransfers> transfers, std::function<void()> finish);
  ~GlooWork() override;

  /// Throws gloo's errors as a CommError, with the call of the peer if that was another one and failed too.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  /// Only wait() tells.
  bool isCompleted() override { return transfers_.empty(); }
  bool isSuccess() const override { return transfers_.empty(); }

  /// Makes wait() throw that the group was destroyed, also one that waits already. From any thread.
  void give_up() noexcept;

 private:
  const CollectiveSignature call_;
  const std::shared_ptr<const GroupInfo> info_;
  const std::shared_ptr<GlooShared> shared_;
  std::mutex mutex_;                    // guards which transfers there are
  std::list<GlooTransfers> transfers_;  // until they are done
  std::function<void()> finish_;
};

}  // namespace tessera
