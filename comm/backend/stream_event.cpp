#include "comm/backend/stream_event.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera {

bool has_streams(c10::DeviceType device) {
  return device != c10::kCPU && device != c10::kMeta;
}

StreamEvent StreamEvent::here(c10::Device device) {
  StreamEvent mark;
  if (has_streams(device.type())) {
    mark.event_.emplace(device.type());
    mark.event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  return mark;
}

void StreamEvent::wait() const {
  if (event_) {
    wait(c10::impl::VirtualGuardImpl(event_->device_type()).getStream(event_->device()));
  }
}

void StreamEvent::wait(const c10::Stream& stream) const {
  if (event_) {
    event_->block(stream);
  }
}

void StreamEvent::synchronize() const {
  if (event_) {
    event_->synchronize();
  }
}

}  // namespace tessera
