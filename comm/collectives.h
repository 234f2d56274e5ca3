#pragma once
// Collectives over a process group: with point_to_point.h, the only place of the library that calls a c10d backend.
//
// With 2 ranks that hold x = [0, 1] (rank 0) and x = [10, 20] (rank 1):
//   all_gather(out, x, group)                    out = [0, 1, 10, 20] on both
//   reduce_scatter(out, x, ReduceOp::Sum, group) out = [10] on rank 0, [21] on rank 1
//   all_reduce(x, ReduceOp::Sum, group)          x = [10, 21] on both
//   broadcast(x, 0, group)                       x = [0, 1] on both
//
// Tensors are dense and contiguous, of one dtype and on one device; sizes are compared by number of elements, so that
// flat buffers serve as well as shaped ones. Every rank of the group calls the same collectives in the same order.
// Reductions are in the order of the ranks, save over "hierarchical", which takes each host's first, and "nccl", whose
// order is its own (comm/backend/reduce_op.h); an all_reduce gives all ranks the same bits. No autograd, and a written
// tensor's version counter does not change. A group of one rank copies and touches no backend.
//
// Messages between two ranks: comm/point_to_point.h.
//
// The plain form waits. The _async form returns a Pending; until its wait() returns, write neither tensor and do not
// read the output. Waits may come in any order, with one limit: a call over "shm" goes on only while its ranks wait for
// calls over "shm", so ranks that wait for one of these and for one of a group of another backend, such as an adopted
// one, wait in the same order. On CUDA wait() makes the current stream wait, not the host; over "threads" the host
// waits until the other ranks have called (comm/threads/thread_backend.h).
//
// Throws ValueError for tensors that do not fit (before anything is sent), CommError naming the group and the
// collective when a peer left, called something else, or did not arrive in time.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "comm/backend/reduce_op.h"
#include "comm/backend/tensor_segment.h"
#include "comm/context/comm_stats.h"
#include "comm/process_group.h"

namespace c10d {
class Work;
}

namespace tessera {

class ZeroCopyWork;

/// A collective in flight: a movable value. One that is dropped without wait() leaves the output unspecified. It does
/// not keep the group: where that has gone, wait() may throw a CommError which says so.
/// Thread safety: for one thread at a time.
class [[nodiscard]] Pending {
 public:
  Pending() noexcept;  // nothing to wait for
  explicit Pending(c10::intrusive_ptr<c10d::Work> work) noexcept;
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  ~Pending();

  /// Returns when the output may be used; later calls return at once. Throws CommError, and after a failure every later
  /// call throws too.
  void wait();
  /// After wait(): returns when the input may be written, which differs for the forms with parts alone. Throws
  /// CommError.
  void wait_for_readers();
  /// Both of the above for a result that nobody wants: a failure of the collective is no error, and what else its group
  /// is asked for fails too. Returns whether it ended well: if not, peers may still read and write its tensors, which
  /// the work keeps.
  bool discard();

 private:
  c10::intrusive_ptr<c10d::Work> work_;          // until wait() returned
  c10::intrusive_ptr<ZeroCopyWork> being_read_;  // from then on
};

/// output = the inputs of all ranks, one after the other; output.numel() = group size x input.numel(). Neither may
/// overlap the other, save that input may be this rank's own part of output.
void all_gather(const at::Tensor& output, const at::Tensor& input, const ProcessGroupPtr& group);
Pending all_gather_async(const at::Tensor& output, const at::Tensor& input, const ProcessGroupPtr& group);

/// output on rank i = the i-th of group-size equal parts of the reduced inputs; input.numel() = group size x
/// output.numel(). Neither may overlap the other, save that output may be this rank's own part of input.
void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const ProcessGroupPtr& group);
Pending reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                             const ProcessGroupPtr& group);

/// The two above with parts in place of the tensor of all ranks (comm/backend/tensor_segment.h); ranks that call one
/// form and the other may meet. Where supports_segments() says so, else NotImplementedError: for tensors on the CPU
/// over "threads", "shm" and "fake". all_gather casts to the parts' dtype as it writes them, where both are floating;
/// the peers may read the inputs of both after wait() too, until wait_for_readers().
bool supports_segments(const ProcessGroupPtr& group, c10::DeviceType device);
Pending all_gather_segments_async(TensorSegments outputs, const at::Tensor& input, const ProcessGroupPtr& group);
Pending reduce_scatter_segments_async(const at::Tensor& output, TensorSegments inputs, ReduceOp op,
                                      const ProcessGroupPtr& group);
/// Zeros on the CPU, to be the input of many all-gathers over a group that takes parts. Where its ranks share memory
/// ("shm"), they lie, from 64 KiB on, where the others read them directly (comm/shm/shared_memory.h): a copy less a
/// gather.
at::Tensor zeros_to_gather(int64_t numel, at::ScalarType dtype, const ProcessGroupPtr& group);

/// tensor = the reduction of all ranks' tensors, in place.
void all_reduce(const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group);
Pending all_reduce_async(const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group);

/// tensor = the tensor of rank `source` of the group, in place.
void broadcast(const at::Tensor& tensor, int source, const ProcessGroupPtr& group);
Pending broadcast_async(const at::Tensor& tensor, int source, const ProcessGroupPtr& group);

/// Cuts input along dim 0 into input_splits[i] rows for rank i; output = the rows from rank 0, 1, ..., with
/// output_splits[i] rows from rank i. Empty splits mean equal parts. Rows have the same shape on all ranks. The tensors
/// must not overlap.
void all_to_all(const at::Tensor& output, const at::Tensor& input, std::vector<int64_t> output_splits,
                std::vector<int64_t> input_splits, const ProcessGroupPtr& group);
Pending all_to_all_async(const at::Tensor& output, const at::Tensor& input, std::vector<int64_t> output_splits,
                         std::vector<int64_t> input_splits, const ProcessGroupPtr& group);

/// output on rank i = inputs[i] of rank `source`; parts may differ in size. `inputs` is only read on the source: where
/// they do not fit, every rank throws ValueError, for which the source tells the others first.
void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int source, const ProcessGroupPtr& group);

/// outputs[i] on rank `destination` = the input of rank i; parts may differ in size. `outputs` is only used there, and
/// checked as `inputs` of scatter() are.
void gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int destination,
            const ProcessGroupPtr& group);

/// Returns when every rank of the group has called it.
void barrier(const ProcessGroupPtr& group);

}  // namespace tessera
