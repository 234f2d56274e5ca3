#include "fully_shard/memory/reduce_stream.h"

#include <utility>

namespace tessera {

void ReduceStream::retire(c10::DataPtr memory) {
  if (exists() && memory) {
    retired_.keep({std::move(memory), {}}, mark());
  }
}

void ReduceStream::drain() {
  if (exists()) {
    mark().wait();
    retired_.end();
  }
}

}  // namespace tessera
