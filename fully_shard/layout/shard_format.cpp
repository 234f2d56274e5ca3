#include "fully_shard/layout/shard_format.h"

#include "fully_shard/layout/gather_tag.h"

namespace tessera {

ShardFormat::ShardFormat(ParamLayout layout, const std::vector<at::ScalarType>& dtypes)
    : layout_(std::move(layout)), dtype_(dtypes.at(0)), bytes_(GatherFormat::of_dtypes(layout_, dtypes)) {}

int64_t ShardFormat::numel() const {
  return bytes_ ? bytes_->bytes() + kTagBytes : gather_numel(layout_);
}

at::Tensor ShardFormat::chunk(const at::Tensor& flat, size_t i) const {
  const auto& slot = layout_.slots[i];
  return bytes_ ? bytes_->item(flat, i) : flat.narrow(0, slot.offset, slot.chunk_numel);
}

std::vector<at::Tensor> ShardFormat::chunks(const at::Tensor& flat) const {
  std::vector<at::Tensor> chunks;
  chunks.reserve(layout_.slots.size());
  for (size_t i = 0; i < layout_.slots.size(); ++i) {
    chunks.push_back(chunk(flat, i));
  }
  return chunks;
}

TensorSegment ShardFormat::part(size_t i, const at::Tensor& full) const {
  if (!bytes_) {
    return {layout_.slots[i].offset, layout_.slots[i].chunk_numel, full};
  }
  const auto range = bytes_->range(i);
  return {range.offset, range.numel, full.view(at::kByte)};
}

}  // namespace tessera
