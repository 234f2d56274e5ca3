#include "fully_shard/memory/gather_stream.h"

#include <utility>

namespace tessera {

void GatherStream::defer_free(StreamMemory memory) {
  if (exists()) {
    deferred_.keep(std::move(memory), StreamEvent::here(device_));
  }
}

}  // namespace tessera
