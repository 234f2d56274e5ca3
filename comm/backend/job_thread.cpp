#include "comm/backend/job_thread.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.h"
#include "comm/backend/group_backend.h"
#include "comm/context/rank_context.h"

namespace tessera {

namespace {

class FutureWork final : public c10d::Work {
 public:
  FutureWork(std::string what, std::shared_future<void> done) : what_(std::move(what)), done_(std::move(done)) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (timeout != kNoTimeout) {  // the backends of jobs have their own timeouts
      TESSERA_CHECK(CommError, is_done_within(std::min(timeout, kLongestTimeout)), "{}: not done within {} ms", what_,
                    timeout.count());
    }
    done_.get();
    return true;
  }
  bool isCompleted() override { return is_done_within(std::chrono::milliseconds(0)); }
  bool isSuccess() const override {
    try {
      if (is_done_within(std::chrono::milliseconds(0))) {
        done_.get();
        return true;
      }
    } catch (const std::exception&) {
      return false;
    }
    return false;
  }

 private:
  bool is_done_within(std::chrono::milliseconds time) const {
    return done_.wait_for(time) == std::future_status::ready;
  }

  const std::string what_;
  const std::shared_future<void> done_;
};

}  // namespace

JobThread::JobThread() : thread_([this, context = RankContext::current()] { run(context); }) {}

JobThread::~JobThread() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

c10::intrusive_ptr<c10d::Work> JobThread::push(std::string what, std::function<void()> run) {
  Job job{what, std::move(run), {}};
  std::shared_future<void> done = job.done.get_future().share();
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_all();
  return c10::make_intrusive<FutureWork>(std::move(what), std::move(done));
}

void JobThread::run(const RankContext& context) {
  const RankContextGuard as_rank(context);
  const at::AutoDispatchBelowADInplaceOrView below;
  while (true) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stops_ || !jobs_.empty(); });
    if (jobs_.empty()) {
      return;
    }
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    if (stops_ && failure_.empty()) {
      failure_ = "the group was destroyed";
    }
    lock.unlock();
    finish(job);
  }
}

void JobThread::finish(Job& job) {
  try {
    TESSERA_CHECK(CommError, failure_.empty(), "{}: {}", job.what, failure_);
    std::exchange(job.run, nullptr)();  // frees its tensors before waiters are notified
    job.done.set_value();
  } catch (const std::exception& failure) {
    if (failure_.empty()) {
      failure_ = fmt::format("an earlier call failed: {}", failure.what());
    }
    job.done.set_exception(std::current_exception());
  }
}

}  // namespace tessera
