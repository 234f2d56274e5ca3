#include "fully_shard/layout/flat_layout.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "fully_shard/layout/block_copy.h"

namespace tessera {

namespace {

constexpr int64_t kItemAlignment = 16;
/// Bytes for the tag after the items. They keep a rank's bytes a multiple of 16.
constexpr int64_t kTagBytes = 16;

int64_t aligned_bytes(int64_t bytes) {
  return (bytes + kItemAlignment - 1) / kItemAlignment * kItemAlignment;
}

int64_t item_bytes(const GatherItem& item, int64_t numel) {
  return item.extension ? item.extension->encoded_bytes(numel)
                        : numel * static_cast<int64_t>(c10::elementSize(item.dtype));
}

bool differ(const std::vector<GatherItem>& items) {
  return std::ranges::any_of(
      items, [&](const GatherItem& item) { return item.extension != nullptr || item.dtype != items[0].dtype; });
}

}  // namespace

FlatLayout::FlatLayout(ParamLayout params, std::vector<GatherItem> items, bool in_bytes)
    : params_(std::move(params)),
      items_(std::move(items)),
      dtype_(in_bytes || differ(items_) ? at::kByte : items_.at(0).dtype) {
  TESSERA_ASSERT(items_.size() == params_.slots.size(), "{} items for {} parameters", items_.size(),
                 params_.slots.size());
  for (size_t i = 0; i < items_.size(); ++i) {
    const auto& slot = params_.slots[i];
    if (is_in_bytes()) {
      ranges_.push_back({numel_, item_bytes(items_[i], slot.chunk_numel)});
      numel_ += aligned_bytes(ranges_.back().numel);
    } else {
      ranges_.push_back({slot.offset, slot.chunk_numel});
    }
  }
  numel_ = is_in_bytes() ? numel_ + kTagBytes : params_.shard_numel + kSlotAlignment;
  for (size_t i = 0; i < items_.size(); ++i) {
    auto slot = params_.slots[i];
    slot.offset = items_[i].extension ? 0 : ranges_[i].offset / item_size(i);
    copies_.push_back(params_.copies(slot, items_[i].extension ? slot.chunk_numel : numel_ / item_size(i)));
  }
}

int64_t FlatLayout::item_size(size_t i) const {
  return is_in_bytes() ? static_cast<int64_t>(c10::elementSize(items_[i].dtype)) : 1;
}

bool FlatLayout::has_same_dtypes(const FlatLayout& other) const {
  return std::ranges::equal(items_, other.items_, [](const GatherItem& own, const GatherItem& its) {
    return !own.extension && !its.extension && own.dtype == its.dtype;
  });
}

at::Tensor FlatLayout::chunk(const at::Tensor& flat, size_t i) const {
  const auto place = flat.narrow(0, ranges_[i].offset, ranges_[i].numel);
  return is_in_bytes() ? place.view(items_[i].dtype) : place;
}

std::vector<at::Tensor> FlatLayout::chunks(const at::Tensor& flat) const {
  std::vector<at::Tensor> chunks;
  chunks.reserve(items_.size());
  for (size_t i = 0; i < items_.size(); ++i) {
    chunks.push_back(chunk(flat, i));
  }
  return chunks;
}

TensorSegment FlatLayout::segment(size_t i, const at::Tensor& full) const {
  return {ranges_[i].offset, ranges_[i].numel, is_in_bytes() ? full.view(at::kByte) : full};
}

void FlatLayout::encode(const std::vector<at::Tensor>& chunks, const at::Tensor& flat) const {
  const at::AutoDispatchBelowADInplaceOrView below;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (params_.slots[i].chunk_numel == 0) {
      continue;
    }
    if (const auto& extension = items_[i].extension) {
      extension->pre_all_gather(chunks[i], flat.narrow(0, ranges_[i].offset, ranges_[i].numel));
    } else {
      chunk(flat, i).copy_(chunks[i]);
    }
  }
}

/// Returns all ranks' chunks of parameter i, which has an extension, in its compute dtype.
at::Tensor FlatLayout::decoded_chunks(const at::Tensor& gathered, size_t i) const {
  const auto& slot = params_.slots[i];
  auto chunks = at::empty({params_.num_ranks * slot.chunk_numel}, gathered.options().dtype(items_[i].dtype));
  for (int64_t rank = 0; rank < params_.num_ranks; ++rank) {
    if (slot.numel_on(rank, params_.num_ranks) > 0) {
      items_[i].extension->post_all_gather(gathered.narrow(0, rank * numel_ + ranges_[i].offset, ranges_[i].numel),
                                           chunks.narrow(0, rank * slot.chunk_numel, slot.chunk_numel));
    }
  }
  return chunks;
}

void FlatLayout::decode(const at::Tensor& gathered, const std::vector<at::Tensor>& params) const {
  const at::AutoDispatchBelowADInplaceOrView below;
  BlockCopier copier;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (copies_[i].empty()) {
      continue;
    }
    if (items_[i].extension) {
      copier.from_flat(params[i], decoded_chunks(gathered, i), copies_[i]);
    } else {
      copier.from_flat(params[i], is_in_bytes() ? gathered.view(items_[i].dtype) : gathered, copies_[i]);
    }
  }
  copier.run();
}

}  // namespace tessera
