#pragma once
// What NCCL is given in place of a reduction's tensors, so that it reduces as comm/backend/reduce_op.h says: complex
// numbers as pairs; and for minima and maxima a flag with each value, since NCCL drops a NaN where another rank has a
// number.
//
//   rank 0   [3, NaN]   gives [3, NaN, 0, 1]
//   rank 1   [2,   5]   gives [2,   5, 0, 0]     Max: [3, 5, 0, 1], which is [3, NaN]

#include <ATen/core/Tensor.h>

#include <functional>

#include "comm/backend/reduce_op.h"

namespace tessera {

/// Tensors without gaps, of which `output` is one part of as many as there are ranks in `input`, or the same for an
/// all_reduce.
struct NcclReduction {
  at::Tensor output;
  at::Tensor input;
  /// What is left to do when `output` is written, on the stream that has waited for it; null: nothing.
  std::function<void()> finish = nullptr;
};

/// Contiguous tensors on one device. Throw NotImplementedError for a dtype that NCCL does not reduce.
NcclReduction nccl_all_reduce(const at::Tensor& tensor, ReduceOp op);
NcclReduction nccl_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op);

}  // namespace tessera
