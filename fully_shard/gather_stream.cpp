#include "fully_shard/gather_stream.h"

#include <fmt/format.h>

#include <exception>
#include <utility>

namespace tessera {

GatherStream::~GatherStream() {
  try {
    drain();
  } catch (const std::exception& failure) {
    fmt::print(stderr, "fully_shard: buffers of a gather were freed early: {}\n", failure.what());
  }
}

void GatherStream::retire(GatherMemory memory) {
  if (!stream_) {
    return;  // `memory` ends
  }
  drain();
  used_ = StreamMark::here(device_);
  retired_ = std::move(memory);
}

void GatherStream::drain() {
  if (stream_) {
    used_.wait(*stream_);
    retired_ = {};
  }
}

}  // namespace tessera
