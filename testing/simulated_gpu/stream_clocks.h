#pragma once
// Which work on streams is done before which, by vector clocks: integers alone.
//
// A stream does its work in order. Work of two streams has no order unless an event of one was recorded, and the other
// one waited for it, or the host waited for one before it gave the other its work. All threads of the host count as
// one: what the host does has the order in which it happened.
//
// Thread safety: for one thread at a time.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::simulated_gpu {

/// The `time`-th piece of work that a stream was given; the first is 1.
struct Moment {
  size_t stream = 0;
  uint64_t time = 0;
};

/// Of each stream, how many pieces of work are done. Streams that are missing have 0.
using Clock = std::vector<uint64_t>;

class StreamClocks {
 public:
  /// A new stream, by its number.
  size_t add_stream();

  /// A stream gets a piece of work.
  Moment launch(size_t stream);
  /// What is done once the stream is where it is now: what an event records.
  Clock record(size_t stream) const;
  void wait(size_t stream, const Clock& event);
  void host_waits(const Clock& event);

  /// Whether `moment` is over before anything begins that `stream` is given from now on.
  bool is_over(Moment moment, size_t stream) const;
  /// Whether the host has waited until `moment` was over.
  bool is_over_for_host(Moment moment) const;
  /// The last piece of work that `stream` was given; its time is 0 if there is none.
  Moment last(size_t stream) const;

 private:
  std::vector<Clock> streams_;
  Clock host_;
};

}  // namespace tessera::simulated_gpu
