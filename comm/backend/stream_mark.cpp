#include "comm/backend/stream_mark.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera {

bool has_streams(c10::DeviceType device) {
  return device != c10::kCPU && device != c10::kMeta;
}

StreamMark StreamMark::here(c10::Device device) {
  StreamMark mark;
  if (has_streams(device.type())) {
    mark.event_.emplace(device.type());
    mark.event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  return mark;
}

void StreamMark::wait() const {
  if (event_) {
    wait(c10::impl::VirtualGuardImpl(event_->device_type()).getStream(event_->device()));
  }
}

void StreamMark::wait(const c10::Stream& stream) const {
  if (event_) {
    event_->block(stream);
  }
}

void StreamMark::synchronize() const {
  if (event_) {
    event_->synchronize();
  }
}

}  // namespace tessera
