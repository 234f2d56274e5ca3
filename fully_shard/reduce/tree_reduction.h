#pragma once
// Sums over ranks by a binary tree, in which each rank has an aligned range of parts. The sum does not depend on the
// number of ranks. Example, a tree of 8 parts, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)):
//
//   3 ranks   {0, 1, 2, 3} {4, 5} {6, 7}       r0 + (r1 + r2)
//   4 ranks   {0, 1} {2, 3} {4, 5} {6, 7}      (r0 + r1) + (r2 + r3)
//
// Thread safety: like collectives (comm/collectives.h).

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "comm/collectives.h"

namespace tessera {

struct TreeParts {
  int64_t first = 0;
  int64_t count = 0;
  bool operator==(const TreeParts&) const = default;
};

/// Returns the parts of a rank, an aligned power of two of them. `parts` is a power of two, at least least_parts().
TreeParts tree_parts(int64_t rank, int64_t ranks, int64_t parts);

/// Returns the smallest power of two that is at least `ranks`.
int64_t least_parts(int64_t ranks);

/// Like reduce_scatter_async() and all_reduce_async() with Sum, in the order of the tree. All ranks must wait in the
/// same order, because wait() of the all-reduce gathers.
Pending tree_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                            const ProcessGroupPtr& group);
Pending tree_all_reduce(const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group);

}  // namespace tessera
