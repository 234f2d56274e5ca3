#pragma once
// Ctrl-C and SIGTERM as a request to stop once the running step is done.

namespace tessera::examples {

/// Keeps the process's first SIGINT or SIGTERM for signal_on_any_rank() as long as it lives. Another one, at least a
/// second later (a terminal and the launcher both send the first), ends the process at once. One per process.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  /// Returns the signal that a rank of the default group got, the same on every rank; 0 for none. Collective.
  int signal_on_any_rank() const;
};

}  // namespace tessera::examples
