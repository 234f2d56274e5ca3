#include "fully_shard/param_layout.h"

#include <c10/util/accumulate.h>

#include "base/error.h"

namespace tessera {

ParamLayout make_param_layout(const std::vector<std::vector<int64_t>>& shapes, int64_t num_ranks) {
  ParamLayout layout{.slots = {}, .num_ranks = num_ranks, .shard_numel = 0};
  for (const auto& shape : shapes) {
    TESSERA_ASSERT(!shape.empty(), "a parameter without dims has no rows");
    ParamSlot slot{.rows = shape[0],
                   .row_numel = c10::multiply_integers(shape.begin() + 1, shape.end()),
                   .chunk_numel = 0,
                   .offset = layout.shard_numel};
    slot.chunk_numel = chunk_length(slot.rows, num_ranks) * slot.row_numel;
    layout.shard_numel += (slot.chunk_numel + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
    layout.slots.push_back(slot);
  }
  return layout;
}

}  // namespace tessera
