#pragma once
// The order of work on streams of a device, without the host's waiting: an event that exists on devices with streams.
//
//   StreamEvent mark = StreamEvent::here(tensor.device());   // after what the current stream was given
//   ... on another thread, or with another current stream:
//   mark.wait();                                           // what this stream is given next comes after it

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

namespace tessera {

/// Whether work on this device goes to streams, and the host goes on. No for the CPU and meta.
bool has_streams(c10::DeviceType device);

/// Thread safety: as that of a value.
class StreamEvent {
 public:
  /// There is nothing to wait for.
  StreamEvent() = default;
  /// Where the calling thread's current stream of `device` is now; nothing on a device without streams.
  static StreamEvent here(c10::Device device);

  /// What the calling thread's current stream of the mark's device is given next waits for it.
  void wait() const;
  /// The same for another stream.
  void wait(const c10::Stream& stream) const;
  /// The host waits.
  void synchronize() const;

 private:
  std::optional<c10::Event> event_;
};

}  // namespace tessera
