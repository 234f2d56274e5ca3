#pragma once
// Helpers that several tests of meshes share.

#include <ATen/ops/full.h>

#include <cstdint>
#include <vector>

#include "comm/collectives.h"
#include "comm/process_group.h"

namespace tessera {

using Ints = std::vector<int64_t>;

/// Adds 1 << rank over the ranks of `group`: the bits of the sum name its ranks.
inline float sum_over(const ProcessGroupPtr& group) {
  const at::Tensor tensor = at::full({1}, static_cast<float>(1 << get_rank()));
  all_reduce(tensor, ReduceOp::Sum, group);
  return tensor.item<float>();
}

}  // namespace tessera
