#include "fully_shard/memory/retired_memory.h"

#include <exception>
#include <utility>

#include "base/report.h"

namespace tessera {

RetiredMemory::~RetiredMemory() {
  try {
    end();
  } catch (const std::exception& failure) {
    report_failure("fully_shard: a stream's memory was freed early: {}", failure.what());
  }
}

void RetiredMemory::keep(StreamMemory memory, StreamMark used) {
  end();
  used_ = std::move(used);
  memory_ = std::move(memory);
}

void RetiredMemory::end() {
  if (owner_) {
    used_.wait(*owner_);
  } else {
    used_.wait();
  }
  used_ = {};
  memory_ = {};
}

}  // namespace tessera
