#include "fully_shard/reduce_stream.h"

#include <fmt/format.h>

#include <exception>
#include <utility>

namespace tessera {

ReduceStream::~ReduceStream() {
  try {
    end_retired();
  } catch (const std::exception& failure) {
    fmt::print(stderr, "fully_shard: a buffer of a reduction was freed early: {}\n", failure.what());
  }
}

void ReduceStream::retire(c10::DataPtr memory) {
  if (!stream_ || !memory) {
    return;  // `memory` ends
  }
  end_retired();
  used_ = mark();
  retired_ = std::move(memory);
}

void ReduceStream::drain() {
  if (stream_) {
    mark().wait();
    end_retired();
  }
}

void ReduceStream::end_retired() {
  used_.wait();
  retired_ = {};
}

}  // namespace tessera
