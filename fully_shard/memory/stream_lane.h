#pragma once
// StreamLane: a side stream, and memory shared with the compute stream. Does nothing on devices without streams. All
// units of a rank share one lane of each kind:
//
//   computing                      ReduceScatter                   AllReduce
//   copy-in i, reduce-scatter i
//   backward of the next unit      waits for reduce-scatter i      all-reduce i; waits for it; divides, adds, casts
//   waits for reduce-scatter i
//   copy-in, reduce-scatter i + 1
//
// Memory used by another stream must not be reused before that work is done. Waiting at once would wait for everything
// queued on that stream, so each buffer is kept until the next one is deferred. This replaces record_stream. Source:
// FSDPCommContext and AllGatherState of torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
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
  ~StreamLane();
  StreamLane(const StreamLane&) = delete;
  StreamLane& operator=(const StreamLane&) = delete;

  /// Makes the lane's stream the calling thread's current one.
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

  bool exists() const { return stream_.has_value(); }
  /// Makes later work of the lane wait for the work queued so far on the current stream.
  void wait_for_current() const { wait_for(StreamEvent::here(device_)); }
  void wait_for(const StreamEvent& mark) const;
  /// Returns an event after the work queued so far on the lane.
  StreamEvent mark() const;

  /// Frees memory that was allocated in a Scope, after the work queued with it on the current stream.
  void defer_free(StreamMemory memory);
  /// Does the same for memory of the compute stream that the lane's work uses.
  void defer_free_of_current(c10::DataPtr memory);
  /// Makes the owner of deferred memory wait for the work that uses it, and frees it.
  void end_deferred();
  /// Makes the current stream wait for all work of the lane. Frees deferred memory.
  void drain();

 private:
  void keep(StreamMemory memory, StreamEvent used, std::optional<c10::Stream> owner);

  c10::Device device_;
  std::optional<c10::Stream> stream_;
  StreamMemory memory_;
  StreamEvent used_;                  // after the work that uses the deferred memory
  std::optional<c10::Stream> owner_;  // of that memory; none: the calling thread's current stream
};

enum class LaneKind {
  Gather,         // all-gathers, and the casts before them
  ReduceScatter,  // waits for reduce-scatters; without replicas, also divides, adds and casts
  AllReduce,      // the same for the all-reduce over replicas
  HostCopy,       // copies gradients to the host
};

/// Returns the calling rank's lane of a kind on `device`.
std::shared_ptr<StreamLane> shared_lane(LaneKind kind, c10::Device device);

}  // namespace tessera
