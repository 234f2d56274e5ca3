#include "fully_shard/all_gather.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include "comm/collectives.h"

namespace tessera {

namespace {

/// `gathered` is [ranks, shard_numel]. All chunks but the last are full, so a parameter is at most two copies:
/// its full chunks as one matrix, and the rest.
void copy_out(const at::Tensor& gathered, const ParamSlot& slot, const at::Tensor& flat) {
  if (slot.numel() == 0) {
    return;
  }
  const int64_t full_chunks = slot.numel() / slot.chunk_numel;
  const int64_t full_numel = full_chunks * slot.chunk_numel;
  flat.narrow(0, 0, full_numel)
      .view({full_chunks, slot.chunk_numel})
      .copy_(gathered.narrow(0, 0, full_chunks).narrow(1, slot.offset, slot.chunk_numel));
  if (const int64_t rest = slot.numel() - full_numel; rest > 0) {
    flat.narrow(0, full_numel, rest).copy_(gathered.select(0, full_chunks).narrow(0, slot.offset, rest));
  }
}

}  // namespace

void all_gather_params(const std::vector<ShardedParam>& params, const ParamLayout& layout, const at::Tensor& flat_shard,
                       at::ScalarType compute_dtype, const ProcessGroupPtr& group) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto input = flat_shard.to(compute_dtype);
  const auto gathered = at::empty({layout.num_ranks, layout.shard_numel}, input.options());
  all_gather(gathered, input, group);
  for (const auto& param : params) {
    copy_out(gathered, param.slot(), param.unsharded_flat());
  }
}

}  // namespace tessera
