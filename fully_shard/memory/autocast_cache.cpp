#include "fully_shard/memory/autocast_cache.h"

#include <ATen/autocast_mode.h>

namespace tessera {

void forget_autocasts() {
  at::autocast::clear_cache();
}

}  // namespace tessera
