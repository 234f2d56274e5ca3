#pragma once
// What the tests of meshes have in common.

#include <ATen/ops/full.h>

#include <cstdint>
#include <vector>

#include "comm/collectives.h"
#include "comm/process_group.h"

namespace tessera {

using Ints = std::vector<int64_t>;

/// Of 1 << rank over the ranks of `group`: which ranks it has.
inline float sum_over(const ProcessGroupPtr& group) {
  const at::Tensor tensor = at::full({1}, static_cast<float>(1 << get_rank()));
  all_reduce(tensor, ReduceOp::Sum, group);
  return tensor.item<float>();
}

}  // namespace tessera
