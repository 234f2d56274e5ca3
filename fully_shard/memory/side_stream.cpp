#include "fully_shard/memory/side_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera {

SideStream::SideStream(c10::Device device) : device_(device) {
  if (has_streams(device.type())) {
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
}

void SideStream::wait_for_current() const {
  wait_for(StreamEvent::here(device_));
}

void SideStream::wait_for(const StreamEvent& mark) const {
  if (stream_) {
    mark.wait(*stream_);
  }
}

StreamEvent SideStream::mark() const {
  const Scope scope(*this);
  return StreamEvent::here(device_);
}

}  // namespace tessera
