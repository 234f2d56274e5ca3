#include "fully_shard/all_gather.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace tessera {

namespace {

/// Digits that every dtype of a parameter holds exactly.
constexpr int64_t kDigit = 64;

/// With the stamp, a multiple of 16 too.
constexpr int64_t kStampBytes = 16;

constexpr const char* kFaults[] = {"", ", whose parameters were replaced after they were sharded",
                                   ", whose parameters are still on the meta device"};

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

void write_stamp(const at::Tensor& flat_shard, int64_t unit, GatherFault fault) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto digits =
      at::tensor({unit % kDigit, unit / kDigit, static_cast<int64_t>(fault)}, at::device(at::kCPU).dtype(at::kLong));
  flat_shard.narrow(0, flat_shard.numel() - kSlotAlignment, 3).copy_(digits);
}

ShardGather::ShardGather(const ParamLayout& layout, const at::TensorOptions& compute_options)
    : num_ranks_(layout.num_ranks),
      numel_(gather_numel(layout)),
      stamp_offset_(layout.shard_numel),
      cast_(numel_, compute_options),
      gathered_buffer_(num_ranks_ * numel_, compute_options) {}

ShardGather::ShardGather(int64_t num_ranks, int64_t bytes, at::Device device)
    : num_ranks_(num_ranks),
      numel_(bytes + kStampBytes),
      stamp_offset_(numel_ - kSlotAlignment),
      cast_(numel_, at::TensorOptions(device).dtype(at::kByte)),
      gathered_buffer_(num_ranks_ * numel_, at::TensorOptions(device).dtype(at::kByte)) {}

void ShardGather::start(const at::Tensor& flat_shard, const ProcessGroupPtr* group, BlockPool& pool,
                        const AllGatherFn& all_gather) {
  auto input = flat_shard;
  if (input.dtype() != cast_.tensor().dtype() || input.device() != cast_.tensor().device()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    input = cast_.borrow(pool);
    input.copy_(flat_shard, /*non_blocking=*/true);
  }
  if (num_ranks_ == 1) {
    gathered_ = std::move(input);
    return;
  }
  gathered_ = gathered_buffer_.borrow(pool);
  pending_ = all_gather(gathered_, input, *group);
}

const at::Tensor& ShardGather::wait() {
  pending_.wait();
  return gathered_;
}

void ShardGather::give_back() {
  gathered_ = at::Tensor();
  gathered_buffer_.give_back();
  cast_.give_back();
}

at::Tensor ShardGather::stamp_of(int64_t rank) const {
  return gathered_.narrow(0, rank * numel_ + stamp_offset_, 3);
}

void ShardGather::check_stamps(int64_t unit, const UnitNames& names) const {
  if (!gathered_.device().is_cpu()) {
    return;
  }
  const size_t item = gathered_.element_size();
  const auto* data = static_cast<const char*>(gathered_.const_data_ptr());
  bool equal = true;
  for (int64_t rank = 1; rank < num_ranks_; ++rank) {
    const auto* stamp = data + stamp_offset_ * item;
    equal = equal && std::memcmp(stamp, stamp + rank * numel_ * item, 3 * item) == 0;
  }
  if (equal) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  std::string who;
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    const auto digits = stamp_of(rank).to(at::kLong);
    const auto* digit = digits.const_data_ptr<int64_t>();
    who += fmt::format("{}rank {}: {}{}", rank == 0 ? "" : ", ", rank, name_of(digit[0] + kDigit * digit[1], names),
                       kFaults[std::clamp<int64_t>(digit[2], 0, 2)]);
  }
  TESSERA_CHECK(StateError, false,
                "fully_shard: the ranks do not gather alike ({}), so every rank stops here; this rank gathers {}. All "
                "ranks run the same modules in the same order, and leave the parameters' data and dtype as they are",
                who, name_of(unit, names));
}

}  // namespace tessera
