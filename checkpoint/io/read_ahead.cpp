#include "checkpoint/io/read_ahead.h"

#include <utility>

namespace tessera::dcp {

ReadAhead::ReadAhead(size_t count, size_t depth, std::function<void(size_t)> read)
    : count_(count), depth_(depth), read_(std::move(read)), thread_([this] { run(); }) {}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ReadAhead::wait_for(size_t i) {
  std::unique_lock lock(mutex_);
  used_ = i;
  changed_.notify_all();
  changed_.wait(lock, [&] { return done_ > i || error_; });
  if (done_ <= i) {
    std::rethrow_exception(error_);
  }
}

void ReadAhead::run() {
  std::unique_lock lock(mutex_);
  while (done_ < count_) {
    changed_.wait(lock, [&] { return stops_ || done_ < used_ + depth_; });
    if (stops_) {
      return;
    }
    lock.unlock();
    std::exception_ptr error;
    try {
      read_(done_);  // only this thread changes done_
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = error;
    done_ += error ? 0 : 1;
    changed_.notify_all();
    if (error) {
      return;
    }
  }
}

}  // namespace tessera::dcp
