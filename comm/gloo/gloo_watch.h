#pragma once
// Ends waits over gloo for ranks that are gone.
//
// gloo fails a wait when the connection ends, with two exceptions: a partially received tensor, and transfers that are
// queued behind a wait for a slow rank. Therefore a thread interrupts long waits, which then check a probe for each
// peer: a receive of nothing, which fails when the connection ends.

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "comm/backend/group_backend.h"
#include "comm/launch/host_process.h"

namespace tessera {

/// Number of interrupted waits after which a transfer over an ended connection counts as lost.
constexpr int kWaitsUntilLost = 3;

/// Watches a group's connections. Thread safety: any number of threads.
class GlooWatch {
 public:
  /// `probes` are pending receives from each member, null for this rank and for members that are already gone.
  /// `members` are their processes, or empty if unknown.
  GlooWatch(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> probes, std::vector<HostProcess> members);
  ~GlooWatch();
  GlooWatch(const GlooWatch&) = delete;
  GlooWatch& operator=(const GlooWatch&) = delete;

  /// Calls `interrupt`, from another thread, ten times a second while it lives.
  class Scope {
   public:
    Scope(GlooWatch& watch, std::function<void()> interrupt);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend class GlooWatch;
    GlooWatch& watch_;
    const std::function<void()> interrupt_;
  };

  /// Returns whether the connection has ended. Pending transfers with this peer then never complete.
  bool is_closed(int peer);
  /// Waits for a transfer with `peer`. Throws gloo's errors, and CommError if the connection has ended.
  void wait_for(c10d::Work& transfer, int peer, std::chrono::milliseconds timeout);
  /// Throws CommError for a wait fault (comm/launch/job_store.h).
  static void check_waits();
  /// Throws a CommError with the members on this host that have died, if any, for a call that has failed with `peer`.
  void check_members(const std::string& call, const GroupInfo& info, int peer) const;

 private:
  void run();
  bool has_died(int member) const;

  const int rank_;
  const std::vector<HostProcess> members_;
  const HostProcess own_;
  std::mutex mutex_;  // guards the next four
  std::vector<c10::intrusive_ptr<c10d::Work>> probes_;
  std::condition_variable ends_;
  bool stops_ = false;
  std::vector<Scope*> scopes_;
  std::thread thread_;
};

}  // namespace tessera
