#include "fully_shard/gather/all_gather.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/error.h"

namespace tessera {

namespace {

constexpr const char* kFaults[] = {"", ", whose parameters were replaced after they were sharded",
                                   ", whose parameters are still on the meta device",
                                   ", whose parameters were changed in place between forward and backward",
                                   ", whose parameters may have been changed between forward and backward"};
static_assert(std::size(kFaults) == kShardFaultCount);

std::string name_of(int64_t unit, const UnitNames& names) {
  const bool known = names && unit < static_cast<int64_t>(names->size());
  return known ? fmt::format("'{}'", (*names)[unit]) : fmt::format("number {}", unit);
}

}  // namespace

std::vector<std::vector<BlockCopy>> gather_copies(const ParamLayout& layout) {
  std::vector<std::vector<BlockCopy>> copies;
  for (const auto& slot : layout.slots) {
    copies.push_back(layout.copies(slot, gather_numel(layout)));
  }
  return copies;
}

ShardGather::ShardGather(const ParamLayout& layout, const at::TensorOptions& compute_options)
    : num_ranks_(layout.num_ranks),
      numel_(gather_numel(layout)),
      tag_offset_(layout.shard_numel),
      cast_(numel_, compute_options),
      gathered_buffer_(num_ranks_ * numel_, compute_options) {}

ShardGather::ShardGather(int64_t num_ranks, int64_t bytes, at::Device device)
    : num_ranks_(num_ranks),
      numel_(bytes + kTagBytes),
      tag_offset_(numel_ - kSlotAlignment),
      cast_(numel_, at::TensorOptions(device).dtype(at::kByte)),
      gathered_buffer_(num_ranks_ * numel_, at::TensorOptions(device).dtype(at::kByte)) {}

/// In the dtype and on the device of the unsharded parameters.
at::Tensor ShardGather::as_sent(const at::Tensor& flat_shard, BlockPool& pool) {
  if (flat_shard.dtype() == cast_.tensor().dtype() && flat_shard.device() == cast_.tensor().device()) {
    return flat_shard;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& cast = cast_.acquire(pool);
  cast.copy_(flat_shard, /*non_blocking=*/true);
  return cast;
}

void ShardGather::start(const at::Tensor& input, const ProcessGroupPtr* group, BlockPool& pool,
                        const AllGatherFn& all_gather) {
  auto sent = as_sent(input, pool);
  if (num_ranks_ == 1) {
    gathered_ = std::move(sent);
    return;
  }
  gathered_ = gathered_buffer_.acquire(pool);
  pending_ = all_gather(gathered_, sent, *group);
}

void ShardGather::set_segments(std::vector<TensorSegment> parts) {
  tags_ = at::empty({num_ranks_ * kSlotAlignment}, cast_.tensor().options());
  parts.push_back({tag_offset_, kSlotAlignment, tags_});
  parts_ = std::make_shared<const std::vector<TensorSegment>>(std::move(parts));
}

void ShardGather::start_in_place(const at::Tensor& input, const ProcessGroupPtr& group, BlockPool& pool) {
  TESSERA_ASSERT(has_segments(), "a gather in place without parts");
  const bool is_cast_on_arrival = input.device() == tags_.device();
  pending_ = all_gather_segments_async(parts_, is_cast_on_arrival ? input : as_sent(input, pool), group);
}

const at::Tensor& ShardGather::wait() {
  try {
    pending_.wait();
  } catch (...) {
    leave_memory();
    throw;
  }
  return gathered_;
}

void ShardGather::discard() {
  try {
    if (!pending_.discard()) {
      leave_memory();
    }
  } catch (...) {
    leave_memory();
    throw;
  }
}

/// A collective that failed on one peer may still receive from another, into tensors that it keeps. So these stay with
/// it, memory and all, and there are new ones.
void ShardGather::leave_memory() {
  gathered_ = at::Tensor();
  gathered_buffer_ = PooledBuffer(num_ranks_ * numel_, gathered_buffer_.tensor().options());
  cast_ = PooledBuffer(numel_, cast_.tensor().options());
}

StreamMemory ShardGather::release() {
  gathered_ = at::Tensor();
  return {gathered_buffer_.release(), cast_.release()};
}

ShardGather::TagPlaces ShardGather::tag_places() const {
  return gathered_.defined() ? TagPlaces{gathered_, tag_offset_, numel_} : TagPlaces{tags_, 0, kSlotAlignment};
}

bool ShardGather::tags_are_equal() const {
  const auto [in, offset, stride] = tag_places();
  const size_t item = in.element_size();
  const auto* const tag = static_cast<const char*>(in.const_data_ptr()) + offset * item;
  bool equal = true;
  for (int64_t rank = 1; rank < num_ranks_; ++rank) {
    equal = equal && std::memcmp(tag, tag + rank * stride * item, 3 * item) == 0;
  }
  return equal;
}

/// One a rank.
std::vector<GatherTag> ShardGather::tags() const {
  const auto [in, offset, stride] = tag_places();
  std::vector<GatherTag> tags;
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    tags.push_back(read_tag(in.narrow(0, offset + rank * stride, 3)));
  }
  return tags;
}

bool ShardGather::is_tagged(ShardFault fault, ShardFault own) const {
  if (!reads_tags()) {
    return false;
  }
  if (tags_are_equal()) {
    return own == fault;
  }
  return std::ranges::count(tags(), fault, &GatherTag::fault) > 0;
}

void ShardGather::check_tags(int64_t unit, const UnitNames& names) const {
  if (!reads_tags() || tags_are_equal()) {
    return;
  }
  std::string who;
  int64_t rank = 0;
  for (const auto& tag : tags()) {
    who += fmt::format("{}rank {}: {}{}", rank == 0 ? "" : ", ", rank, name_of(tag.unit, names),
                       kFaults[static_cast<size_t>(tag.fault)]);
    ++rank;
  }
  TESSERA_CHECK(StateError, false,
                "fully_shard: the ranks do not gather alike ({}), so every rank stops here; this rank gathers {}. All "
                "ranks run the same modules in the same order, leave the parameters' data and dtype as they are, and "
                "run backward() before optimizer.step()",
                who, name_of(unit, names));
}

}  // namespace tessera
