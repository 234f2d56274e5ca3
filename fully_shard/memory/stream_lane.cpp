#include "fully_shard/memory/stream_lane.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <map>
#include <string>
#include <utility>

#include "base/report.h"
#include "comm/context/rank_context.h"

namespace tessera {

StreamLane::StreamLane(c10::Device device) : device_(device) {
  if (has_streams(device.type())) {
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
}

StreamLane::~StreamLane() {
  try {
    end_deferred();
  } catch (const std::exception& failure) {
    report_failure("fully_shard: a stream's memory was freed early: {}", failure.what());
  }
}

void StreamLane::wait_for(const StreamEvent& mark) const {
  if (stream_) {
    mark.wait(*stream_);
  }
}

StreamEvent StreamLane::mark() const {
  const Scope scope(*this);
  return StreamEvent::here(device_);
}

void StreamLane::keep(StreamMemory memory, StreamEvent used, std::optional<c10::Stream> owner) {
  end_deferred();
  memory_ = std::move(memory);
  used_ = std::move(used);
  owner_ = owner;
}

void StreamLane::defer_free(StreamMemory memory) {
  if (exists()) {
    keep(std::move(memory), StreamEvent::here(device_), stream_);
  }
}

void StreamLane::defer_free_of_current(c10::DataPtr memory) {
  if (exists() && memory) {
    keep({std::move(memory), {}}, mark(), std::nullopt);
  }
}

void StreamLane::end_deferred() {
  if (owner_) {
    used_.wait(*owner_);
  } else {
    used_.wait();
  }
  used_ = {};
  memory_ = {};
}

void StreamLane::drain() {
  if (exists()) {
    mark().wait();
    end_deferred();
  }
}

std::shared_ptr<StreamLane> shared_lane(LaneKind kind, c10::Device device) {
  struct Lanes {
    std::map<std::pair<LaneKind, std::string>, std::shared_ptr<StreamLane>> all;
  };
  auto& lane = rank_local<Lanes>()->all[{kind, device.str()}];
  if (!lane) {
    lane = std::make_shared<StreamLane>(device);
  }
  return lane;
}

}  // namespace tessera
