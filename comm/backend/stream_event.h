#pragma once
// Orders work on device streams without blocking the host. Does nothing on devices without streams.
//
//   StreamEvent mark = StreamEvent::here(tensor.device());  // after work issued to the current stream so far
//   ... on another thread, or with another current stream:
//   mark.wait();                                            // work issued to this stream from now on follows it

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

namespace tessera {

/// Returns whether work on this device is asynchronous; false for the CPU and meta.
bool has_streams(c10::DeviceType device);

/// Event as a value. Thread safety: like any value.
class StreamEvent {
 public:
  /// Makes an event without anything to wait for.
  StreamEvent() = default;
  /// Records the calling thread's current stream of `device`.
  static StreamEvent here(c10::Device device);

  /// Makes the calling thread's current stream of the event's device wait.
  void wait() const;
  /// Makes `stream` wait.
  void wait(const c10::Stream& stream) const;
  /// Makes the host wait.
  void synchronize() const;

 private:
  std::optional<c10::Event> event_;
};

}  // namespace tessera
