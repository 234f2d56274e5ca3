#include "fully_shard/memory/gather_stream.h"

#include <utility>

namespace tessera {

void GatherStream::retire(StreamMemory memory) {
  if (exists()) {
    retired_.keep(std::move(memory), StreamMark::here(device_));
  }
}

}  // namespace tessera
