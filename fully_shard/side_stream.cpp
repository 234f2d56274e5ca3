#include "fully_shard/side_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "comm/stream_mark.h"

namespace tessera {

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

}  // namespace tessera
