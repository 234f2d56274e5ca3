#pragma once
// The streams on which a rank's reductions are waited for and finished, on a device with streams. The stream that
// computes waits for a reduce-scatter where the buffer that it read is to be used again, and for what follows only
// where backward ends:
//
//   computing                      ReduceScatterStream             AllReduceStream (where there are replicas)
//   copy-in i, reduce-scatter i
//   backward of the next unit      waits for reduce-scatter i      all-reduce i; waits for it; divides, adds, casts
//   waits for reduce-scatter i
//   copy-in, reduce-scatter i + 1
//   ...
//   waits for both: gradients are there
//
// Without replicas the division and what follows it are on the ReduceScatterStream. As FSDPCommContext of
// torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
//
// On devices without streams nothing here does anything, and memory ends at once.
// Thread safety: for the thread that runs the rank's backward.

#include <c10/core/Allocator.h>

#include "fully_shard/memory/side_stream.h"
#include "fully_shard/memory/stream_keep_alive.h"

namespace tessera {

class ReduceStream : public SideStream {
 public:
  using SideStream::SideStream;

  /// Memory of the stream that computes, which this one has been given work with (stream_keep_alive.h): that stream
  /// waits for what was reduced a unit before.
  void defer_free(c10::DataPtr memory);
  /// What the computing stream is given next comes after all that this one was given. Ends what is retired.
  void drain();

 private:
  StreamKeepAlive deferred_;
};

struct ReduceScatterStream : ReduceStream {
  using ReduceStream::ReduceStream;
};
struct AllReduceStream : ReduceStream {
  using ReduceStream::ReduceStream;
};

}  // namespace tessera
