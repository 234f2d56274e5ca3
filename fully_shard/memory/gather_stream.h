#pragma once
// The stream on which a rank's units gather, on a device with streams: a gather waits for what it reads and for the
// gathers before it, but not for all that the current stream has been given to compute, so that it runs beside that.
//
//   stream->wait_for_current();                  // once an iteration: the optimizer has written the shards
//   {
//     const GatherStream::Scope scope(*stream);
//     ... cast, take a buffer, issue the all-gather
//   }
//   ... wait for it on the current stream, and copy from the buffer there
//   stream->defer_free({std::move(buffer)});
//
// The buffer is memory of this stream (stream_keep_alive.h): two units' buffers are held, and a gather waits for what
// was computed two units before. After FSDPCommContext and AllGatherState of
// torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
//
// On devices without streams memory ends at once.
// Thread safety: for the thread that runs the rank's forward and backward.

#include <c10/core/Device.h>

#include "fully_shard/memory/side_stream.h"
#include "fully_shard/memory/stream_keep_alive.h"

namespace tessera {

class GatherStream : public SideStream {
 public:
  explicit GatherStream(c10::Device device) : SideStream(device), deferred_(stream_) {}

  /// Memory that was taken in a Scope, and that the current stream has been given work with since.
  void defer_free(StreamMemory memory);
  /// Ends what is retired.
  void drain() { deferred_.end(); }

 private:
  StreamKeepAlive deferred_;
};

}  // namespace tessera
