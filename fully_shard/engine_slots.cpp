#include "fully_shard/engine_slots.h"

#include "comm/rank_context.h"

namespace tessera {

std::shared_ptr<EngineSlots> engine_slots() {
  return rank_local<EngineSlots>();
}

}  // namespace tessera
