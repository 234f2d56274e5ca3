#pragma once
// Checks and conversions that backends share.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "comm/backend/reduce_op.h"
#include "comm/backend/tensor_segment.h"

namespace tessera {

/// Converts c10d's reduction. Throws NotImplementedError for those without a counterpart, such as bitwise ones.
ReduceOp reduce_op_from_c10d(const c10d::ReduceOp& op);
c10d::ReduceOp::RedOpType reduce_op_to_c10d(ReduceOp op);

/// Throws ValueError unless `tensor` is dense and contiguous.
void check_dense_tensor(std::string_view place, const at::Tensor& tensor);

/// Like check_dense_tensor, and requires the CPU.
void check_cpu_tensor(std::string_view place, const at::Tensor& tensor);

/// Returns some elements, all elements, or all bytes of a contiguous tensor, as a 1-D view of stride 1. (For a tensor
/// of one element with other strides, view(-1) would keep them and view(dtype) would reject them.)
at::Tensor flat_elements(const at::Tensor& tensor, int64_t begin, int64_t count);
at::Tensor flat_elements(const at::Tensor& tensor);
at::Tensor flat_bytes(const at::Tensor& tensor);

/// Throws ValueError unless dtypes are equal and the numbers of elements differ by the factor `group_size`.
void check_all_gather(const at::Tensor& output, const at::Tensor& input, int group_size);
void check_reduce_scatter(const at::Tensor& output, const at::Tensor& input, int group_size);

/// Checks and returns the reduction (reduce_op_from_c10d, check_reducible in comm/backend/local_reduce.h), and checks
/// the tensors of a reduce_scatter.
ReduceOp check_reduce_scatter(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op,
                              int group_size);
ReduceOp check_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op);

/// Returns the source's rank. Throws ValueError unless it is in the group.
int check_broadcast(const c10d::BroadcastOptions& options, int group_size);

/// Returns the only tensor of c10d's list. Throws ValueError for another number of tensors.
const at::Tensor& only_tensor(std::string_view place, const std::vector<at::Tensor>& tensors);
/// Like only_tensor, with check_cpu_tensor().
const at::Tensor& only_cpu_tensor(std::string_view place, const std::vector<at::Tensor>& tensors);

/// Returns the number of elements per rank, from rows along dim 0 (empty: equal splits). Throws ValueError if they do
/// not add up.
std::vector<int64_t> element_splits(std::string_view place, const at::Tensor& tensor,
                                    const std::vector<int64_t>& row_splits, int group_size);

/// Elements of an all_to_all to and from each rank.
struct AllToAllSplits {
  std::vector<int64_t> sends, receives;
};

/// Returns the splits by element_splits(). Throws ValueError if they do not add up, dtypes differ, or this rank's split
/// for itself has two sizes.
AllToAllSplits check_all_to_all(const at::Tensor& output, const at::Tensor& input,
                                const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits,
                                int rank, int group_size);

/// Throws ValueError unless the segments follow each other within a rank's `flat`. Their tensors must match its dtype
/// and device, and have no more elements than all ranks' segments.
void check_segments(std::string_view place, const std::vector<TensorSegment>& parts, const at::Tensor& flat,
                    int group_size);
/// Like check_segments, for segments that are written; all of these may have another floating dtype than `flat`.
void check_written_segments(std::string_view place, const std::vector<TensorSegment>& parts, const at::Tensor& flat,
                            int group_size);

}  // namespace tessera
