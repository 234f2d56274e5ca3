#pragma once
// The "threads" backend: ranks are threads of one process and read each other's tensors (comm/threads/thread_world.h).
// For tests, debuggers and sanitizers; it is not made to be fast. For tensors on the CPU and on CUDA, where several
// ranks may share one GPU, which NCCL refuses.
//
// On CUDA a call goes to a stream of the group, as NCCL's do: it waits for what each rank's current stream was given
// before the call, and the stream that is current in a work's wait() waits for it. The host waits for other ranks'
// calls alone. Tensors stay until a rank has waited. All tensors of a call, of all ranks, are on one device. Autograd
// runs the backward of CUDA tensors of all ranks in one thread, unless each rank's thread says otherwise (docs/gpu.md).

#include <memory>

#include "comm/backend/collective_call_backend.h"
#include "comm/threads/thread_world.h"

namespace tessera {

/// One rank's end of a group. A work's wait() takes part in carrying out the call of all ranks.
/// Thread safety: for one thread at a time; messages may have a thread of their own.
class ThreadBackend final : public CollectiveCallBackend {
 public:
  ThreadBackend(GroupInfo info, std::shared_ptr<ThreadGroup> group);

  const std::string getBackendName() const override { return "threads"; }

 private:
  bool takes_device(c10::DeviceType device) const override {
    return device == c10::DeviceType::CPU || device == c10::DeviceType::CUDA;
  }
  c10::intrusive_ptr<c10d::Work> post(CollectiveCall call) override;
  c10::intrusive_ptr<c10d::Work> post_message(CollectiveCall call, RankPair pair) override;

  const std::shared_ptr<ThreadGroup> group_;
};

}  // namespace tessera
