#pragma once
// Converts reductions for NCCL, so that it reduces as comm/backend/reduce_op.h says. Complex numbers become pairs.
// Minima and maxima get a flag with each value, since NCCL drops a NaN if another rank has a number.
//
//   rank 0   [3, NaN]   becomes [3, NaN, 0, 1]
//   rank 1   [2,   5]   becomes [2,   5, 0, 0]     Max: [3, 5, 0, 1], which is [3, NaN]

#include <ATen/core/Tensor.h>

#include <functional>

#include "comm/backend/reduce_op.h"

namespace tessera {

/// Reduction of dense tensors. `output` is a chunk of `input` per rank, or has its size for an all_reduce.
struct NcclReduction {
  at::Tensor output;
  at::Tensor input;
  /// Work to run after NCCL's, on a stream that has waited for `output`; null if there is none.
  std::function<void()> finish = nullptr;
};

/// Converts contiguous tensors on one device. Throws NotImplementedError for a dtype that NCCL does not reduce.
NcclReduction nccl_all_reduce(const at::Tensor& tensor, ReduceOp op);
NcclReduction nccl_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op);

}  // namespace tessera
