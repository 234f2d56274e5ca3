#pragma once
// A stream beside the one that computes, on a device that has streams; on others nothing here does anything.
//
//   {
//     const SideStream::Scope scope(stream);      // what is called here goes to the stream
//     ...
//   }
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>
#include <unordered_map>

#include "comm/backend/stream_event.h"
#include "comm/context/rank_context.h"

namespace tessera {

class SideStream {
 public:
  explicit SideStream(c10::Device device);

  /// For its lifetime the stream is the calling thread's current one.
  class Scope {
   public:
    explicit Scope(const SideStream& stream) {
      if (stream.stream_) {
        guard_.emplace(*stream.stream_);
      }
    }

   private:
    std::optional<c10::StreamGuard> guard_;
  };

  /// Whether the device has streams.
  bool exists() const { return stream_.has_value(); }
  /// What the stream is given next waits for what the calling thread's current one was given so far.
  void wait_for_current() const;
  /// What the stream is given next waits for `mark`.
  void wait_for(const StreamEvent& mark) const;
  /// After what the stream was given.
  StreamEvent mark() const;

 protected:
  c10::Device device_;
  std::optional<c10::Stream> stream_;
};

/// For copies to the host.
struct HostCopyStream : SideStream {
  using SideStream::SideStream;
};

/// The calling rank's stream of this kind, a SideStream, on `device`: all its units share it.
template <class Stream>
std::shared_ptr<Stream> shared_stream(c10::Device device) {
  struct Streams {
    std::unordered_map<c10::Device, std::shared_ptr<Stream>> by_device;
  };
  auto& stream = rank_local<Streams>()->by_device[device];
  if (!stream) {
    stream = std::make_shared<Stream>(device);
  }
  return stream;
}

}  // namespace tessera
