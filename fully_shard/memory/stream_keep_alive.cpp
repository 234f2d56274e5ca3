#include "fully_shard/memory/stream_keep_alive.h"

#include <exception>
#include <utility>

#include "base/report.h"

namespace tessera {

StreamKeepAlive::~StreamKeepAlive() {
  try {
    end();
  } catch (const std::exception& failure) {
    report_failure("fully_shard: a stream's memory was freed early: {}", failure.what());
  }
}

void StreamKeepAlive::keep(StreamMemory memory, StreamEvent used) {
  end();
  used_ = std::move(used);
  memory_ = std::move(memory);
}

void StreamKeepAlive::end() {
  if (owner_) {
    used_.wait(*owner_);
  } else {
    used_.wait();
  }
  used_ = {};
  memory_ = {};
}

}  // namespace tessera
