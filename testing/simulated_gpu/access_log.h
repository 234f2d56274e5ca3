#pragma once
// What work has read and written in a block of memory, and whether new work may do so without waiting: integers alone.

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "testing/simulated_gpu/stream_clocks.h"

namespace tessera::simulated_gpu {

/// Bytes [begin, end) of the block.
struct Access {
  Moment moment;
  size_t begin = 0;
  size_t end = 0;
  bool writes = false;
  const char* op = "";  // lives as long as the log
};

class AccessLog {
 public:
  /// An earlier access that `next` must wait for, and does not.
  std::optional<Access> find_race(const Access& next, const StreamClocks& clocks) const;
  /// An access by another stream than `stream` that its next work may not wait for.
  std::optional<Access> find_open(size_t stream, const StreamClocks& clocks) const;
  void add(const Access& access, const StreamClocks& clocks);
  /// Accesses by this stream are known to whoever owns the memory, which waits for them.
  void forgive(size_t stream);

 private:
  std::vector<Access> accesses_;
};

/// "aten::mul reads bytes [0, 64) on stream 2".
std::string describe(const Access& access);

}  // namespace tessera::simulated_gpu
