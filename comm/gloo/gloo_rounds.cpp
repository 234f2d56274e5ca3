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

c10::intrusive_ptr<c10d::Work> GlooRounds::push(std::string what, std::function<void()> rounds) {
  if (!thread_) {
    thread_.emplace();
  }
  return thread_->push(std::move(what), std::move(rounds));
}

void GlooRounds::wait(const c10::intrusive_ptr<GlooWork>& round) {
  {
    const std::lock_guard lock(mutex_);
    in_flight_ = round;
    if (ends_) {
      round->give_up();
    }
  }
  round->wait();
  const std::lock_guard lock(mutex_);
  in_flight_.reset();
}

}  // namespace tessera
