#include "fully_shard/side_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <unordered_map>

#include "comm/rank_context.h"
#include "comm/stream_mark.h"

namespace tessera {

namespace {

struct HostCopyStreams {
  std::unordered_map<c10::Device, std::shared_ptr<const SideStream>> by_device;
};

}  // namespace

SideStream::SideStream(c10::Device device) : device_(device) {
  if (has_streams(device.type())) {
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
}

void SideStream::wait_for_current() const {
  if (stream_) {
    StreamMark::here(device_).wait(*stream_);
  }
}

std::shared_ptr<const SideStream> host_copy_stream(c10::Device device) {
  auto& stream = rank_local<HostCopyStreams>()->by_device[device];
  if (!stream) {
    stream = std::make_shared<const SideStream>(device);
  }
  return stream;
}

}  // namespace tessera
