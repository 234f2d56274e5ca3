#pragma once
// The "fake" backend: this process is one of any number of ranks; there are no peers, and no data moves. For planning
// memory of larger runs, and for measuring host time without a network.

#include <vector>

#include "comm/backend/group_backend.h"

namespace tessera {

/// Completes every collective at once with this rank's own data. all_gather repeats the input, reduce_scatter returns
/// this rank's chunk of it, and all_to_all this rank's split and zeros; all_reduce, broadcast and recv leave the tensor
/// unchanged, and send does nothing. Works on any device. Thread safety: any number of threads.
class FakeBackend final : public GroupBackend {
 public:
  explicit FakeBackend(GroupInfo info);

  const std::string getBackendName() const override { return "fake"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options = {}) override;
  /// Excludes GPUs, like backends with peers.
  bool supports_segments(c10::DeviceType device) const override { return device == c10::DeviceType::CPU; }
  c10::intrusive_ptr<c10d::Work> all_gather_segments(TensorSegments outputs, const at::Tensor& input) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_segments(const at::Tensor& output, TensorSegments inputs,
                                                         ReduceOp op) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;

 private:
  const c10::intrusive_ptr<c10d::Work> completed_;
};

}  // namespace tessera
