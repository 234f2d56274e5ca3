#pragma once
// A stream beside the one that computes, and memory that goes between the two, on a device that has streams; on others
// nothing here does anything, and memory ends at once. All units of a rank share one lane of each kind:
//
//   Gather         all-gathers and the casts before them: a gather waits for what it reads and for the gathers before
//   it,
//                  but not for all that the computing stream was given, so that it runs beside that
//   ReduceScatter  where a reduce-scatter is waited for, and, without replicas, its result divided, added and cast
//   AllReduce      the same of the all-reduce over replicas
//   HostCopy       copies of gradients to the host
//
//   computing                      ReduceScatter                   AllReduce
//   copy-in i, reduce-scatter i
//   backward of the next unit      waits for reduce-scatter i      all-reduce i; waits for it; divides, adds, casts
//   waits for reduce-scatter i
//   copy-in, reduce-scatter i + 1
//   ...
//   waits for both: gradients are there
//
// Memory of one stream that another one was given work with may not be used again before that work is done. If the
// first waited for that at once, it would wait for all that the other was given before as well. So memory stays until
// the next is deferred: two are held, and the wait is for what was done one before. Nothing needs record_stream, whose
// memory comes back at a time that nobody can tell. After FSDPCommContext and AllGatherState of
// torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <array>
#include <memory>
#include <optional>

#include "comm/backend/stream_event.h"

namespace tessera {

/// One or two buffers.
using StreamMemory = std::array<c10::DataPtr, 2>;

class StreamLane {
 public:
  explicit StreamLane(c10::Device device);
  /// Ends what is deferred; reports on stderr that a stream could not be told to wait.
  ~StreamLane();
  StreamLane(const StreamLane&) = delete;
  StreamLane& operator=(const StreamLane&) = delete;

  /// For its lifetime the lane's stream is the calling thread's current one.
  class Scope {
   public:
    explicit Scope(const StreamLane& lane) {
      if (lane.stream_) {
        guard_.emplace(*lane.stream_);
      }
    }

   private:
    std::optional<c10::StreamGuard> guard_;
  };

  /// Whether the device has streams.
  bool exists() const { return stream_.has_value(); }
  /// What the lane is given next waits for what the calling thread's current stream was given so far.
  void wait_for_current() const { wait_for(StreamEvent::here(device_)); }
  /// What the lane is given next waits for `mark`.
  void wait_for(const StreamEvent& mark) const;
  /// After what the lane was given.
  StreamEvent mark() const;

  /// Memory that was taken in a Scope, and that the current stream has been given work with since.
  void defer_free(StreamMemory memory);
  /// Memory of the computing stream that the lane has been given work with.
  void defer_free_of_current(c10::DataPtr memory);
  /// The owner of what is deferred comes after the work on it, and may have the memory.
  void end_deferred();
  /// What the current stream is given next comes after all that the lane was given. Ends what is deferred.
  void drain();

 private:
  void keep(StreamMemory memory, StreamEvent used, std::optional<c10::Stream> owner);

  c10::Device device_;
  std::optional<c10::Stream> stream_;
  StreamMemory memory_;
  StreamEvent used_;                  // after the work on it
  std::optional<c10::Stream> owner_;  // of it; none: the calling thread's current stream
};

enum class LaneKind { Gather, ReduceScatter, AllReduce, HostCopy };

/// The calling rank's lane of this kind on `device`.
std::shared_ptr<StreamLane> shared_lane(LaneKind kind, c10::Device device);

}  // namespace tessera
