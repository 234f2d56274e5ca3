#include "comm/threads/thread_backend.h"

#include <exception>
#include <utility>

namespace tessera {

namespace {

class ThreadWork final : public c10d::Work {
 public:
  ThreadWork(std::shared_ptr<const GroupInfo> info, std::shared_ptr<ThreadGroup> group, int place, CollectiveCall call)
      : info_(std::move(info)),
        group_(std::move(group)),
        place_(place),
        pending_(group_->post(*info_, place, std::move(call))) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (failure_) {
      std::rethrow_exception(failure_);
    }
    if (const auto pending = std::exchange(pending_, nullptr)) {
      try {
        group_->wait(*info_, place_, pending, resolve_timeout(timeout, *info_));
      } catch (...) {
        failure_ = std::current_exception();
        throw;
      }
    }
    return true;
  }
  bool isCompleted() override { return !pending_ || group_->state(*pending_) != ThreadGroup::State::Open; }
  bool isSuccess() const override {
    return !failure_ && (!pending_ || group_->state(*pending_) == ThreadGroup::State::Done);
  }
  void synchronize() override { wait(); }

 private:
  const std::shared_ptr<const GroupInfo> info_;
  const std::shared_ptr<ThreadGroup> group_;
  const int place_;
  ThreadGroup::PendingCollectivePtr pending_;  // until wait()
  std::exception_ptr failure_;                 // thrown by wait()
};

}  // namespace

ThreadBackend::ThreadBackend(GroupInfo info, std::shared_ptr<ThreadGroup> group)
    : CollectiveCallBackend(std::move(info)), group_(std::move(group)) {}

c10::intrusive_ptr<c10d::Work> ThreadBackend::post(CollectiveCall call) {
  return c10::make_intrusive<ThreadWork>(shared_info(), group_, getRank(), std::move(call));
}

c10::intrusive_ptr<c10d::Work> ThreadBackend::post_message(CollectiveCall call, RankPair pair) {
  const int place = pair.from == getRank() ? 0 : 1;
  return c10::make_intrusive<ThreadWork>(shared_info(), group_->messages(pair), place, std::move(call));
}

}  // namespace tessera
