#include "fully_shard/layout/gather_format.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "fully_shard/layout/block_copy.h"

namespace tessera {

namespace {

constexpr int64_t kItemAlignment = 16;

int64_t aligned_bytes(int64_t bytes) {
  return (bytes + kItemAlignment - 1) / kItemAlignment * kItemAlignment;
}

int64_t item_bytes(const GatherItem& item, int64_t numel) {
  return item.extension ? item.extension->encoded_bytes(numel)
                        : numel * static_cast<int64_t>(c10::elementSize(item.dtype));
}

}  // namespace

GatherFormat::GatherFormat(ParamLayout layout, std::vector<GatherItem> items)
    : layout_(std::move(layout)), items_(std::move(items)) {
  TESSERA_ASSERT(items_.size() == layout_.slots.size(), "{} items for {} parameters", items_.size(),
                 layout_.slots.size());
  for (size_t i = 0; i < items_.size(); ++i) {
    offsets_.push_back(bytes_);
    bytes_ += aligned_bytes(item_bytes(items_[i], layout_.slots[i].chunk_numel));
  }
}

bool GatherFormat::is_needed(const std::vector<GatherItem>& items) {
  return std::any_of(items.begin(), items.end(),
                     [&](const GatherItem& item) { return item.extension != nullptr || item.dtype != items[0].dtype; });
}

std::optional<GatherFormat> GatherFormat::of_dtypes(const ParamLayout& layout,
                                                    const std::vector<at::ScalarType>& dtypes) {
  std::vector<GatherItem> items;
  items.reserve(dtypes.size());
  for (const auto dtype : dtypes) {
    items.push_back({.dtype = dtype});
  }
  return is_needed(items) ? std::optional<GatherFormat>({layout, std::move(items)}) : std::nullopt;
}

FlatRange GatherFormat::range(size_t i) const {
  return {offsets_[i], item_bytes(items_[i], layout_.slots[i].chunk_numel)};
}

at::Tensor GatherFormat::item(const at::Tensor& sent, size_t i) const {
  const auto [offset, bytes] = range(i);
  return sent.narrow(0, offset, bytes).view(items_[i].dtype);
}

void GatherFormat::encode(const std::vector<at::Tensor>& chunks, const at::Tensor& sent) const {
  const at::AutoDispatchBelowADInplaceOrView below;
  for (size_t i = 0; i < items_.size(); ++i) {
    const auto& extension = items_[i].extension;
    if (layout_.slots[i].chunk_numel == 0) {
      continue;
    }
    if (extension) {
      const auto [offset, bytes] = range(i);
      extension->pre_all_gather(chunks[i], sent.narrow(0, offset, bytes));
    } else {
      item(sent, i).copy_(chunks[i]);
    }
  }
}

/// The chunks of parameter i, one a rank, in its compute dtype.
at::Tensor GatherFormat::decoded_chunks(const at::Tensor& gathered, int64_t rank_bytes, size_t i) const {
  const auto& slot = layout_.slots[i];
  const int64_t bytes = item_bytes(items_[i], slot.chunk_numel);
  const auto chunks = at::empty({layout_.num_ranks * slot.chunk_numel}, gathered.options().dtype(items_[i].dtype));
  for (int64_t rank = 0; rank < layout_.num_ranks; ++rank) {
    if (slot.numel_of(rank, layout_.num_ranks) > 0) {
      items_[i].extension->post_all_gather(gathered.narrow(0, rank * rank_bytes + offsets_[i], bytes),
                                           chunks.narrow(0, rank * slot.chunk_numel, slot.chunk_numel));
    }
  }
  return chunks;
}

void GatherFormat::decode(const at::Tensor& gathered, int64_t rank_bytes, const std::vector<at::Tensor>& params) const {
  const at::AutoDispatchBelowADInplaceOrView below;
  BlockCopier copier;
  for (size_t i = 0; i < items_.size(); ++i) {
    auto slot = layout_.slots[i];
    if (slot.chunk_numel == 0) {
      continue;
    }
    if (items_[i].extension) {
      slot.offset = 0;
      copier.from_flat(params[i], decoded_chunks(gathered, rank_bytes, i), layout_.copies(slot, slot.chunk_numel));
    } else {
      const auto item = static_cast<int64_t>(c10::elementSize(items_[i].dtype));
      slot.offset = offsets_[i] / item;
      copier.from_flat(params[i], gathered.view(items_[i].dtype), layout_.copies(slot, rank_bytes / item));
    }
  }
  copier.run();
}

}  // namespace tessera
