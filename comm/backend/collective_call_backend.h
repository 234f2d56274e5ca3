#pragma once
// Implements c10d's interface for backends whose ranks read each other's memory: checks, then one CollectiveCall.

#include <vector>

#include "comm/backend/collective_call.h"
#include "comm/backend/group_backend.h"

namespace tessera {

/// Throws ValueError for tensors that are not dense and contiguous on one supported device, or segments not on the CPU.
/// Thread safety: one thread at a time; messages may use another thread.
class CollectiveCallBackend : public GroupBackend {
 public:
  using GroupBackend::GroupBackend;

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options = {}) override;
  bool supports_segments(c10::DeviceType device) const override { return device == c10::DeviceType::CPU; }
  c10::intrusive_ptr<c10d::Work> all_gather_segments(TensorSegments outputs, const at::Tensor& input) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_segments(const at::Tensor& output, TensorSegments inputs,
                                                         ReduceOp op) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;

 protected:
  virtual bool takes_device(c10::DeviceType device) const { return device == c10::DeviceType::CPU; }
  /// Launches the call without waiting for other ranks.
  virtual c10::intrusive_ptr<c10d::Work> post(CollectiveCall call) = 0;
  /// Launches this rank's Send or Recv without waiting.
  virtual c10::intrusive_ptr<c10d::Work> post_message(CollectiveCall call, RankPair pair) = 0;

 private:
  void check(std::string_view place, const at::Tensor& tensor) const;
  void check(std::string_view place, const at::Tensor& output, const at::Tensor& input) const;
};

}  // namespace tessera
