#include "fully_shard/memory/reduce_stream.h"

#include <utility>

namespace tessera {

void ReduceStream::defer_free(c10::DataPtr memory) {
  if (exists() && memory) {
    deferred_.keep({std::move(memory), {}}, mark());
  }
}

void ReduceStream::drain() {
  if (exists()) {
    mark().wait();
    deferred_.end();
  }
}

}  // namespace tessera
