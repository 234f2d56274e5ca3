#include "fully_shard/retired_memory.h"

#include <fmt/format.h>

#include <exception>
#include <utility>

namespace tessera {

RetiredMemory::~RetiredMemory() {
  try {
    end();
  } catch (const std::exception& failure) {
    fmt::print(stderr, "fully_shard: a stream's memory was freed early: {}\n", failure.what());
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
