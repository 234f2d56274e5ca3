#include "fully_shard/layout/gather_tag.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "fully_shard/layout/param_layout.h"

namespace tessera {

namespace {

/// Digits that every dtype of a parameter holds exactly.
constexpr int64_t kDigit = 64;

}  // namespace

void write_tag(const at::Tensor& flat_shard, const GatherTag& tag) {
  if (!flat_shard.device().is_cpu()) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto digits = at::tensor({tag.unit % kDigit, tag.unit / kDigit, static_cast<int64_t>(tag.fault)},
                                 at::device(at::kCPU).dtype(at::kLong));
  flat_shard.narrow(0, flat_shard.numel() - kSlotAlignment, 3).copy_(digits);
}

GatherTag read_tag(const at::Tensor& digits) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto numbers = digits.to(at::kLong);
  const auto* digit = numbers.const_data_ptr<int64_t>();
  const auto fault = static_cast<ShardFault>(std::clamp<int64_t>(digit[2], 0, kShardFaultCount - 1));
  return {.unit = digit[0] + kDigit * digit[1], .fault = fault};
}

}  // namespace tessera
