#pragma once
// Observes the collectives and messages that a rank issues, for tests and debugging.

#include <cstdint>

#include "comm/context/collective.h"

namespace tessera {

/// Runs in the thread that issues a collective, and must not issue one itself.
class CommObserver {
 public:
  virtual ~CommObserver() = default;
  /// Handles a call; `bytes_sent` is counted like CommStats.
  virtual void on_collective(Collective kind, int64_t bytes_sent) = 0;
};

/// Passes the calling rank's collectives to `observer`. Scopes nest, and the innermost one applies. Thread safety: for
/// the thread that issues the rank's collectives.
class CommObserverScope {
 public:
  explicit CommObserverScope(CommObserver& observer);
  ~CommObserverScope();
  CommObserverScope(const CommObserverScope&) = delete;
  CommObserverScope& operator=(const CommObserverScope&) = delete;

 private:
  CommObserver* previous_;
};

/// Hides the calling thread's collectives from observers, which are called without a lock. For threads that work for a
/// rank besides training, such as background saves. Thread safety: affects its own thread only.
class UnobservedScope {
 public:
  UnobservedScope();
  ~UnobservedScope();
  UnobservedScope(const UnobservedScope&) = delete;
  UnobservedScope& operator=(const UnobservedScope&) = delete;

 private:
  bool previous_;
};

}  // namespace tessera
