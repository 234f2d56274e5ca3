#pragma once
// Watches the collectives and messages that a rank issues, as they are issued: for tests and debugging.

#include <cstdint>

#include "comm/context/collective.h"

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

/// What the calling thread issues until the scope ends no observer sees, since that is called without a lock: for a
/// thread that works for a rank beside its training, as a save in the background. Thread safety: of its own.
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
