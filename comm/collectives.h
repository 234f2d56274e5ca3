#pragma once
// Collectives over a process group. Messages between two ranks are in comm/point_to_point.h.
//
//   all_reduce(x, ReduceOp::Sum, group);  // [0, 1] on rank 0 and [10, 20] on rank 1 become [10, 21] on both
//
// All ranks call the same collectives in the same order. Tensors are dense, contiguous, and of one dtype and device;
// only numbers of elements must match, not shapes. There is no autograd, and version counters do not change. Until the
// wait() of an _async form returns, do not write its tensors or read its output. On CUDA, wait() blocks the current
// stream only.
// Throws ValueError, before anything is sent, for tensors that do not fit, and CommError if a peer left, made another
// call or timed out. docs/semantics.md covers the order of reductions and waits.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "comm/backend/reduce_op.h"
#include "comm/backend/tensor_segment.h"
#include "comm/context/comm_stats.h"
#include "comm/context/flight_record.h"
#include "comm/process_group.h"

namespace c10d {
class Work;
}

namespace tessera {

class ZeroCopyWork;

/// Call in flight, movable. Without wait(), its output is unspecified. Thread safety: one thread at a time.
class [[nodiscard]] Pending {
 public:
  Pending() noexcept;  // nothing to wait for
  explicit Pending(c10::intrusive_ptr<c10d::Work> work, FlightCall call = {}) noexcept;
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  ~Pending();

  /// Returns when the output may be used. If the call failed, throws CommError every time.
  void wait();
  /// Returns, after wait(), when the input of a segment form may be written. Throws CommError.
  void wait_for_readers();
  /// Does both and returns false on failure, after which peers may still use the tensors.
  bool discard();

 private:
  c10::intrusive_ptr<c10d::Work> work_;          // until wait() returns
  c10::intrusive_ptr<ZeroCopyWork> being_read_;  // after that
  FlightCall call_;
};

/// Concatenates the inputs of all ranks. `input` may be this rank's chunk of `output`; otherwise they must not overlap.
void all_gather(const at::Tensor& output, const at::Tensor& input, const ProcessGroupPtr& group);
Pending all_gather_async(const at::Tensor& output, const at::Tensor& input, const ProcessGroupPtr& group);

/// Reduces the inputs and stores the i-th of equal chunks on rank i. `output` may be this rank's chunk of `input`.
void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const ProcessGroupPtr& group);
Pending reduce_scatter_async(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                             const ProcessGroupPtr& group);

/// Segment forms, on lists of tensors (comm/backend/tensor_segment.h); all_gather casts floats. They throw
/// NotImplementedError unless supports_segments(). Peers may read the inputs until wait_for_readers().
bool supports_segments(const ProcessGroupPtr& group, c10::DeviceType device);
Pending all_gather_segments_async(TensorSegments outputs, const at::Tensor& input, const ProcessGroupPtr& group);
Pending reduce_scatter_segments_async(const at::Tensor& output, TensorSegments inputs, ReduceOp op,
                                      const ProcessGroupPtr& group);
/// Returns CPU zeros to all-gather from, over "shm" in shared memory if 64 KiB or more. Needs supports_segments().
at::Tensor zeros_to_gather(int64_t numel, at::ScalarType dtype, const ProcessGroupPtr& group);

void all_reduce(const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group);  // in place
Pending all_reduce_async(const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group);

void broadcast(const at::Tensor& tensor, int source, const ProcessGroupPtr& group);  // in place
Pending broadcast_async(const at::Tensor& tensor, int source, const ProcessGroupPtr& group);

/// Sends input_splits[i] rows to rank i and stores received rows by rank. Tensors must not overlap. Empty: equal
/// splits.
void all_to_all(const at::Tensor& output, const at::Tensor& input, std::vector<int64_t> output_splits,
                std::vector<int64_t> input_splits, const ProcessGroupPtr& group);
Pending all_to_all_async(const at::Tensor& output, const at::Tensor& input, std::vector<int64_t> output_splits,
                         std::vector<int64_t> input_splits, const ProcessGroupPtr& group);

/// Sets `output` on rank i to inputs[i] of `source`. Throws ValueError on every rank if sizes do not fit.
void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int source, const ProcessGroupPtr& group);

/// Sets outputs[i] on `destination` to rank i's input. Throws ValueError on every rank if sizes do not fit.
void gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int destination,
            const ProcessGroupPtr& group);

void barrier(const ProcessGroupPtr& group);  // returns when all ranks have called it

}  // namespace tessera
