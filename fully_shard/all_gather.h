#pragma once
// The unshard of a unit: one all-gather of the flat shards, then copy-out into each parameter's own memory,
// with the cast to the compute dtype before the collective so that only the narrow dtype is sent.

#include <vector>

#include "comm/process_group.h"
#include "fully_shard/sharded_param.h"

namespace tessera {

/// Fills the unsharded memory (already allocated) of `params`, whose shards are `flat_shard`. Collective.
void all_gather_params(const std::vector<ShardedParam>& params, const ParamLayout& layout, const at::Tensor& flat_shard,
                       at::ScalarType compute_dtype, const ProcessGroupPtr& group);

}  // namespace tessera
