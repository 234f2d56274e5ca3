#pragma once
// The "threads" backend: ranks are threads of one process and read each other's tensors (comm/threads/thread_world.h).
// For tests, debuggers and sanitizers rather than speed. Ranks may share a GPU, which NCCL does not allow.
//
// On CUDA, calls run on a stream of the group, like NCCL's. It waits for the ranks' current streams at the call, and
// the current stream of wait() waits for it. The host waits only for other ranks' calls. Tensors are kept until a rank
// has waited. All tensors of a call are on one device. Autograd runs the backward of all ranks' CUDA tensors in one
// thread, unless each rank's thread disables that (docs/gpu.md).

#include <memory>

#include "comm/backend/collective_call_backend.h"
#include "comm/threads/thread_world.h"

namespace tessera {

/// One rank's end of a group. wait() helps to carry out the call of all ranks. Thread safety: one thread at a time;
/// messages may use another thread.
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
