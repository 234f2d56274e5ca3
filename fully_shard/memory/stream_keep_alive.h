#pragma once
// Memory of one stream that another one was given work with. The first must not have it again before that work is done;
// if it waited for that at once, it would wait for all that the other was given before as well. So memory stays until
// the next is retired: two are held, and the wait is for what was done one before. Nothing needs record_stream, whose
// memory comes back at a time that nobody can tell.
//
//   StreamKeepAlive retired(gathering);               // whose memory it is
//   retired.keep({std::move(buffer)}, StreamEvent::here(device));
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <optional>

#include "comm/backend/stream_event.h"

namespace tessera {

/// One or two buffers.
using StreamMemory = std::array<c10::DataPtr, 2>;

class StreamKeepAlive {
 public:
  /// `owner`: the stream whose memory it is; none: that of the calling thread's current one.
  explicit StreamKeepAlive(std::optional<c10::Stream> owner = std::nullopt) : owner_(owner) {}
  /// Ends what is kept; reports on stderr that a stream could not be told to wait.
  ~StreamKeepAlive();
  StreamKeepAlive(const StreamKeepAlive&) = delete;
  StreamKeepAlive& operator=(const StreamKeepAlive&) = delete;

  /// `used`: after the other stream's work. Ends what was kept before.
  void keep(StreamMemory memory, StreamEvent used);
  /// What the owner is given next comes after the work, and may have the memory.
  void end();

 private:
  std::optional<c10::Stream> owner_;
  StreamEvent used_;
  StreamMemory memory_;
};

}  // namespace tessera
