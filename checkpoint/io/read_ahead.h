#pragma once
// A thread that reads before the bytes are asked for, so that the disk works while what has come is verified; internal
// to this package. Measured: hints to the kernel (posix_fadvise, readahead) halve what comes in, and a second thread
// gains nothing.

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace tessera::dcp {

/// Calls read(0), read(1), ..., read(count - 1) in a thread of its own. Thread safety: for one thread at a time.
class ReadAhead {
 public:
  /// read(i) begins when the caller no longer uses what read(i - depth) has read.
  ReadAhead(size_t count, size_t depth, std::function<void(size_t)> read);
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;
  /// Waits for a call that has begun; the rest are not made.
  ~ReadAhead();

  /// Returns when read(i) has, or throws what it threw; no call is made after that. The caller, which waits for 0, 1,
  /// ... in turn, no longer uses what was read before.
  void wait_for(size_t i);

 private:
  void run();

  const size_t count_, depth_;
  const std::function<void(size_t)> read_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  size_t used_ = 0;  // what the caller waits for, or uses
  size_t done_ = 0;
  bool stops_ = false;
  std::exception_ptr error_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace tessera::dcp
