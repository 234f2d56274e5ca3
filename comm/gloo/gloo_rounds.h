#pragma once
// Collectives over gloo of several rounds of transfers, where a round needs what the one before has brought. They move
// while nobody waits for them, so that ranks may wait in any order, and compute meanwhile.

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/backend/job_thread.h"
#include "comm/gloo/gloo_work.h"

namespace tessera {

/// A thread, from the first call on, on which a group's later rounds are launched. Thread safety: for one thread at a
/// time.
class GlooRounds {
 public:
  using Round = std::function<c10::intrusive_ptr<GlooWork>()>;

  /// Gives up what is in flight, whose waits fail: peers would not come where a rank leaves by an exception.
  ~GlooRounds();

  /// Waits for `first`, then launches `second` and waits for it. After one that failed, the others fail. `what`: for
  /// messages. The result may outlive this.
  c10::intrusive_ptr<c10d::Work> push(std::string what, c10::intrusive_ptr<GlooWork> first, Round second);

 private:
  void wait(const c10::intrusive_ptr<GlooWork>& work);

  std::mutex mutex_;                        // guards the next two
  c10::intrusive_ptr<GlooWork> in_flight_;  // for which the thread waits
  bool ends_ = false;
  std::optional<JobThread> thread_;  // last: its jobs use the others
};

}  // namespace tessera
