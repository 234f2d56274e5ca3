#pragma once
// Watches the collectives and messages that a rank issues, as they are issued: for tests and debugging.

#include <cstdint>

#include "comm/comm_stats.h"

namespace tessera {

/// Called in the thread that issues a collective; must not issue one itself.
class CommObserver {
 public:
  virtual ~CommObserver() = default;
  /// `bytes_sent` as CommStats counts them.
  virtual void on_collective(Collective kind, int64_t bytes_sent) = 0;
};

/// The calling rank's collectives go to `observer` until the scope ends; scopes nest, the innermost sees them.
/// Thread safety: for the thread of the rank that issues its collectives.
class CommObserverScope {
 public:
  explicit CommObserverScope(CommObserver& observer);
  ~CommObserverScope();
  CommObserverScope(const CommObserverScope&) = delete;
  CommObserverScope& operator=(const CommObserverScope&) = delete;

 private:
  CommObserver* previous_;
};

}  // namespace tessera
