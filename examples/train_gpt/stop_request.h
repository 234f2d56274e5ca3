#pragma once
// Treats Ctrl-C and SIGTERM as requests to stop after the current step.

namespace tessera::examples {

/// Records the process's first SIGINT or SIGTERM for signal_on_any_rank() while it lives. Another one, at least a
/// second later (a terminal and the launcher both send the first), ends the process at once. One per process.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  /// Returns the signal that a rank of the default group received, equal on all ranks; 0 for none. All ranks must call
  /// it.
  int signal_on_any_rank() const;
};

}  // namespace tessera::examples
