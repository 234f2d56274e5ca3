#pragma once
// The "threads" backend: ranks are threads of one process and read each other's tensors (comm/thread_world.h).
// For tests, debuggers and sanitizers. CPU only.

#include <memory>

#include "comm/local_call_backend.h"
#include "comm/thread_world.h"

namespace tessera {

/// One rank's end of a group. A work's wait() takes part in carrying out the call of all ranks.
/// Thread safety: for one thread at a time; messages may have a thread of their own.
class ThreadBackend final : public LocalCallBackend {
 public:
  ThreadBackend(GroupInfo info, std::shared_ptr<ThreadGroup> group);

  const std::string getBackendName() const override { return "threads"; }

 private:
  c10::intrusive_ptr<c10d::Work> post(LocalCall call) override;
  c10::intrusive_ptr<c10d::Work> post_message(LocalCall call, RankPair pair) override;

  const std::shared_ptr<ThreadGroup> group_;
};

}  // namespace tessera
