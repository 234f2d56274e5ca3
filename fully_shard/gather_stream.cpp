#include "fully_shard/gather_stream.h"

#include <fmt/format.h>

#include <exception>
#include <unordered_map>
#include <utility>

#include "comm/rank_context.h"

namespace tessera {

namespace {

struct GatherStreams {
  std::unordered_map<c10::Device, std::shared_ptr<GatherStream>> by_device;
};

}  // namespace

GatherStream::~GatherStream() {
  try {
    drain();
  } catch (const std::exception& failure) {
    fmt::print(stderr, "fully_shard: buffers of a gather were freed early: {}\n", failure.what());
  }
}

std::shared_ptr<GatherStream> GatherStream::of(c10::Device device) {
  auto& stream = rank_local<GatherStreams>()->by_device[device];
  if (!stream) {
    stream = std::make_shared<GatherStream>(device);
  }
  return stream;
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
