#pragma once
// Vector clocks that tell which work on streams precedes which. Integers only.
//
// A stream runs its work in order. Work of two streams is unordered unless one waited for an event of the other, or the
// host waited for one before issuing work to the other. All threads of the host count as one, in the order of their
// actions.
// Thread safety: one thread at a time.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::simulated_gpu {

/// The `time`-th work of a stream, from 1.
struct Moment {
  size_t stream = 0;
  uint64_t time = 0;
};

/// Number of completed works per stream; missing streams have 0.
using Clock = std::vector<uint64_t>;

class StreamClocks {
 public:
  /// Adds a stream and returns its number.
  size_t add_stream();

  /// Adds work to a stream.
  Moment launch(size_t stream);
  /// Returns the work that is complete once the stream reaches its current position, as an event records it.
  Clock record(size_t stream) const;
  void wait(size_t stream, const Clock& event);
  void host_waits(const Clock& event);

  /// Returns whether `moment` is over before any future work of `stream`.
  bool is_over(Moment moment, size_t stream) const;
  /// Returns whether the host has waited for `moment`.
  bool is_over_for_host(Moment moment) const;
  /// Returns the last work of `stream`; its time is 0 if there is none.
  Moment last(size_t stream) const;

 private:
  std::vector<Clock> streams_;
  Clock host_;
};

}  // namespace tessera::simulated_gpu
