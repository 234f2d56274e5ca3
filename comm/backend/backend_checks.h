#pragma once
// Checks and conversions that the backends share.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "comm/backend/reduce_op.h"
#include "comm/backend/tensor_segment.h"

namespace tessera {

/// The reduction that a c10d one asks for. Throws NotImplementedError for those without a counterpart (bitwise ones).
ReduceOp reduce_op_from_c10d(const c10d::ReduceOp& op);
c10d::ReduceOp::RedOpType reduce_op_to_c10d(ReduceOp op);

/// Throws ValueError unless `tensor` is dense and contiguous.
void check_dense_tensor(std::string_view place, const at::Tensor& tensor);

/// The same, and on the CPU.
void check_cpu_tensor(std::string_view place, const at::Tensor& tensor);

/// Elements [begin, begin + count) of a contiguous tensor, all of them, or their bytes, in one dim of stride 1. (A
/// tensor of one element is contiguous whatever its strides are; view(-1) keeps them, and view(dtype) refuses them.)
at::Tensor flat_elements(const at::Tensor& tensor, int64_t begin, int64_t count);
at::Tensor flat_elements(const at::Tensor& tensor);
at::Tensor flat_bytes(const at::Tensor& tensor);

/// Throw ValueError unless both tensors have one dtype, and the one of all ranks `group_size` times the elements of the
/// other, whatever the shapes.
void check_all_gather(const at::Tensor& output, const at::Tensor& input, int group_size);
void check_reduce_scatter(const at::Tensor& output, const at::Tensor& input, int group_size);

/// The checks of calls that reduce: of reduce_op_from_c10d(), whose result they return, of check_reducible()
/// (comm/backend/local_reduce.h), and then of a reduce_scatter's tensors as above.
ReduceOp check_reduce_scatter(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op,
                              int group_size);
ReduceOp check_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op);

/// The source's rank. Throws ValueError unless it is in the group.
int check_broadcast(const c10d::BroadcastOptions& options, int group_size);

/// The only tensor of c10d's list of one. Throws ValueError for another number.
const at::Tensor& only_tensor(std::string_view place, const std::vector<at::Tensor>& tensors);
/// The same, and check_cpu_tensor() of it.
const at::Tensor& only_cpu_tensor(std::string_view place, const std::vector<at::Tensor>& tensors);

/// Elements for each rank, from rows along dim 0 (none: equal parts). Throws ValueError if they do not add up.
std::vector<int64_t> element_splits(std::string_view place, const at::Tensor& tensor,
                                    const std::vector<int64_t>& row_splits, int group_size);

/// Elements of an all_to_all that go to, and come from, each rank.
struct AllToAllSplits {
  std::vector<int64_t> sends, receives;
};

/// Of element_splits(). Throws ValueError if they do not add up, if the tensors differ in dtype, and if this rank does
/// not receive from itself what it sends itself.
AllToAllSplits check_all_to_all(const at::Tensor& output, const at::Tensor& input,
                                const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits,
                                int rank, int group_size);

/// Throws ValueError unless the parts lie in a rank's `flat` one after the other, and their tensors are as `flat` is
/// and hold no more than the ranks' parts.
void check_segments(std::string_view place, const std::vector<TensorSegment>& parts, const at::Tensor& flat,
                    int group_size);
/// The same for parts that are written, which may be of another floating dtype than `flat`, all of the same one.
void check_written_segments(std::string_view place, const std::vector<TensorSegment>& parts, const at::Tensor& flat,
                            int group_size);

}  // namespace tessera
