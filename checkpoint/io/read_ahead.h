#pragma once
// Reads ahead in a thread, so that reading overlaps verification. Internal to this package. Measured: hints to the
// kernel (posix_fadvise, readahead) halve the throughput, and a second thread gains nothing.

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace tessera::dcp {

/// Calls read(0), read(1), ..., read(count - 1) in a background thread. Thread safety: one thread at a time.
class ReadAhead {
 public:
  /// Starts the thread. read(i) begins once the caller no longer uses the result of read(i - depth).
  ReadAhead(size_t count, size_t depth, std::function<void(size_t)> read);
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;
  ~ReadAhead();  // waits for a running call and makes no further ones

  /// Waits for read(i) and throws its error, after which no calls are made. The caller waits for 0, 1, ... in order,
  /// and no longer uses earlier results.
  void wait_for(size_t i);

 private:
  void run();

  const size_t count_, depth_;
  const std::function<void(size_t)> read_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  size_t used_ = 0;  // index that the caller waits for or uses
  size_t done_ = 0;
  bool stops_ = false;
  std::exception_ptr error_;
  std::thread thread_;  // last, since it uses the other members
};

}  // namespace tessera::dcp
