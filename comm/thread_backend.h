#pragma once
// The "threads" backend: ranks are threads of one process and read each other's tensors (comm/thread_world.h).
// For tests, debuggers and sanitizers. CPU only.

#include <memory>
#include <vector>

#include "comm/group_backend.h"
#include "comm/thread_world.h"

namespace tessera {

/// One rank's end of a group. A work's wait() takes part in carrying out the call of all ranks. Tensors must be dense,
/// contiguous and on the CPU (ValueError). Thread safety: for one thread at a time.
class ThreadBackend final : public GroupBackend {
 public:
  ThreadBackend(GroupInfo info, std::shared_ptr<ThreadGroup> group);

  const std::string getBackendName() const override { return "threads"; }

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
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options = {}) override;

 private:
  c10::intrusive_ptr<c10d::Work> post(ThreadCall call);

  const std::shared_ptr<ThreadGroup> group_;
};

}  // namespace tessera
