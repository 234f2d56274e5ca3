#include "fully_shard/layout/param_layout.h"

#include <c10/util/accumulate.h>

#include <algorithm>

#include "base/error.h"

namespace tessera {

bool ParamLayout::is_cut_on_dim_0() const {
  return std::all_of(slots.begin(), slots.end(), [](const ParamSlot& slot) { return slot.outer == 1; });
}

std::vector<BlockCopy> ParamLayout::copies(const ParamSlot& slot, int64_t rank_numel) const {
  std::vector<BlockCopy> copies;
  if (slot.numel() == 0) {
    return copies;
  }
  if (slot.outer == 1) {
    const int64_t full = slot.full_chunks(), rest = slot.rest_numel();
    if (full > 0) {
      copies.push_back({slot.offset, rank_numel, 0, slot.chunk_numel, full, slot.chunk_numel});
    }
    if (rest > 0) {
      copies.push_back({slot.offset + full * rank_numel, rest, full * slot.chunk_numel, rest, 1, rest});
    }
    return copies;
  }
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const auto own = slot.rows_on(rank, num_ranks);
    const int64_t cols = own.length * slot.row_numel;
    if (cols > 0) {
      copies.push_back({slot.offset + rank * rank_numel, cols, own.offset * slot.row_numel, slot.rows * slot.row_numel,
                        slot.outer, cols});
    }
  }
  return copies;
}

std::vector<FlatRange> ParamLayout::unused(int64_t rank_numel) const {
  std::vector<FlatRange> ranges;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    for (size_t i = 0; i < slots.size(); ++i) {
      const int64_t begin = slots[i].offset + slots[i].numel_on(rank, num_ranks);
      const int64_t end = i + 1 < slots.size() ? slots[i + 1].offset : shard_numel;
      if (begin < end) {
        ranges.push_back({rank * rank_numel + begin, end - begin});
      }
    }
  }
  return ranges;
}

ParamLayout pack_slots(std::vector<ParamSlot> slots, int64_t num_ranks) {
  ParamLayout layout{.slots = std::move(slots), .num_ranks = num_ranks, .shard_numel = 0};
  for (auto& slot : layout.slots) {
    slot.chunk_numel = slot.outer * chunk_length(slot.rows, num_ranks) * slot.row_numel;
    slot.offset = layout.shard_numel;
    layout.shard_numel += aligned_numel(slot.chunk_numel);
  }
  return layout;
}

ParamLayout make_param_layout(const std::vector<std::vector<int64_t>>& shapes, int64_t num_ranks,
                              const std::vector<int64_t>& dims) {
  TESSERA_ASSERT(dims.empty() || dims.size() == shapes.size(), "{} dims for {} shapes", dims.size(), shapes.size());
  std::vector<ParamSlot> slots;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto& shape = shapes[i];
    const int64_t dim = dims.empty() ? 0 : dims[i];
    TESSERA_ASSERT(dim >= 0 && dim < static_cast<int64_t>(shape.size()), "dim {} of {}", dim, shape.size());
    slots.push_back({.outer = c10::multiply_integers(shape.begin(), shape.begin() + dim),
                     .rows = shape[dim],
                     .row_numel = c10::multiply_integers(shape.begin() + dim + 1, shape.end())});
  }
  return pack_slots(std::move(slots), num_ranks);
}

}  // namespace tessera
