#include "comm/gloo/gloo_rounds.h"

#include <utility>

namespace tessera {

GlooRounds::~GlooRounds() {
  const std::lock_guard lock(mutex_);
  ends_ = true;
  if (in_flight_) {
    in_flight_->give_up();
  }
}

c10::intrusive_ptr<c10d::Work> GlooRounds::push(std::string what, c10::intrusive_ptr<GlooWork> first, Round second) {
  if (!thread_) {
    thread_.emplace();
  }
  return thread_->push(std::move(what), [this, first = std::move(first), second = std::move(second)] {
    wait(first);
    wait(second());
  });
}

void GlooRounds::wait(const c10::intrusive_ptr<GlooWork>& work) {
  {
    const std::lock_guard lock(mutex_);
    in_flight_ = work;
    if (ends_) {
      work->give_up();
    }
  }
  work->wait();
  const std::lock_guard lock(mutex_);
  in_flight_.reset();
}

}  // namespace tessera
