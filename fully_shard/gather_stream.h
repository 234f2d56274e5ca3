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
//   stream->retire({std::move(buffer)});
//
// The buffer is memory of this stream, which must not have it again before the copy is done. If the stream waited for
// that at once, it would wait for all that was computed before the copy as well, and the next gather with it. So a
// buffer stays until the next one is retired: two units' buffers are held, and a gather waits for what was computed two
// units before. Nothing needs record_stream, whose memory comes back at a time that nobody can tell. After
// FSDPCommContext and AllGatherState of torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
//
// On devices without streams memory ends at once.
// Thread safety: for the thread that runs the rank's forward and backward.

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <array>
#include <memory>

#include "comm/stream_mark.h"
#include "fully_shard/side_stream.h"

namespace tessera {

/// Buffers of one gather: gathered, and what was sent.
using GatherMemory = std::array<c10::DataPtr, 2>;

class GatherStream : public SideStream {
 public:
  using SideStream::SideStream;
  ~GatherStream();
  GatherStream(const GatherStream&) = delete;
  GatherStream& operator=(const GatherStream&) = delete;

  /// Memory that was taken in a Scope, and that the current stream has been given work with since.
  void retire(GatherMemory memory);
  /// Ends what is retired.
  void drain();

 private:
  StreamMark used_;
  GatherMemory retired_;
};

}  // namespace tessera
