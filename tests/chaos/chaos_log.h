#pragma once
// A log of ranks that may be killed: a file of lines, each written by one call of the system.
//
//   resumed 4                     rank 0 goes on after 4 steps
//   step 4 0x1.8p+0 81234567890   rank 0 has made step 4: loss, time
//   in_memory 5                   the in-memory checkpoint of 5 steps is complete
//   saving 6                      the checkpoint of 6 steps begins
//   saved 6                       it is complete
//   kill 2 1 3 81234567890        in start 2, rank 1 ends in phase 3: time

#include <fcntl.h>
#include <fmt/format.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "base/error.h"

namespace tessera::testing {

enum class Phase { Start, Resume, Forward, Backward, Optimizer, Checkpoint, InMemory };
constexpr int kPhases = 7, kPhasesOnDisk = 6;  // the last one only where there are in-memory checkpoints

/// Of one clock for all processes of the host.
inline int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

/// Thread safety: any thread, and any process.
class ChaosLog {
 public:
  explicit ChaosLog(const std::string& path)
      : file_(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) {
    TESSERA_CHECK(Error, file_ >= 0, "{}: cannot be opened", path);
  }
  ~ChaosLog() { close(file_); }
  ChaosLog(const ChaosLog&) = delete;
  ChaosLog& operator=(const ChaosLog&) = delete;

  void write(const std::string& line) {
    const std::string text = line + "\n";
    const ssize_t written = ::write(file_, text.data(), text.size());
    TESSERA_CHECK(Error, written == static_cast<ssize_t>(text.size()), "the log cannot be written");
  }

 private:
  int file_;
};

}  // namespace tessera::testing
