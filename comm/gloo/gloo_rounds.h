#pragma once
// Collectives over gloo with several rounds, in which a round needs the result of the previous one. They progress while
// no rank waits for them, so ranks may wait in any order.

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/backend/job_thread.h"
#include "comm/gloo/gloo_work.h"

namespace tessera {

/// Launches a group's rounds on a thread, which starts with the first call. Thread safety: one thread at a time.
class GlooRounds {
 public:
  /// Abandons works in flight, whose waits fail: peers may not come if a rank leaves by an exception.
  ~GlooRounds();

  /// Runs `rounds` on the thread, after those before. After a failure, later ones fail. `what` is used in errors. The
  /// result may outlive this object.
  c10::intrusive_ptr<c10d::Work> push(std::string what, std::function<void()> rounds);
  /// Waits for a round, until this object is destroyed. For `rounds`.
  void wait(const c10::intrusive_ptr<GlooWork>& round);

 private:
  std::mutex mutex_;                        // guards the next two members
  c10::intrusive_ptr<GlooWork> in_flight_;  // round that the thread waits for
  bool ends_ = false;
  std::optional<JobThread> thread_;  // last, since its jobs use the others
};

}  // namespace tessera
