#include "comm/thread_backend.h"

namespace tessera {

namespace {

class ThreadWork final : public c10d::Work {
 public:
  ThreadWork(std::shared_ptr<const GroupInfo> info, std::shared_ptr<ThreadGroup> group, ThreadGroup::MeetingPtr meeting)
      : info_(std::move(info)), group_(std::move(group)), meeting_(std::move(meeting)) {}

  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    if (meeting_) {
      group_->wait(*info_, meeting_);
      meeting_.reset();
    }
    return true;
  }
  bool isCompleted() override { return !meeting_; }
  bool isSuccess() const override { return !meeting_; }

 private:
  const std::shared_ptr<const GroupInfo> info_;
  const std::shared_ptr<ThreadGroup> group_;
  ThreadGroup::MeetingPtr meeting_;
};

}  // namespace

ThreadBackend::ThreadBackend(GroupInfo info, std::shared_ptr<ThreadGroup> group)
    : LocalCallBackend(std::move(info)), group_(std::move(group)) {}

c10::intrusive_ptr<c10d::Work> ThreadBackend::post(LocalCall call) {
  ThreadGroup::MeetingPtr meeting = group_->post(info(), std::move(call));
  return c10::make_intrusive<ThreadWork>(shared_info(), group_, std::move(meeting));
}

}  // namespace tessera
