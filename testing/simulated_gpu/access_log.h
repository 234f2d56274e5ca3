#pragma once
// Accesses to a block of memory, and whether new work may access it without waiting. Integers only.

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "testing/simulated_gpu/stream_clocks.h"

namespace tessera::simulated_gpu {

/// Access to bytes [begin, end) of the block.
struct Access {
  Moment moment;
  size_t begin = 0;
  size_t end = 0;
  bool writes = false;
  const char* op = "";  // must outlive the log
};

class AccessLog {
 public:
  /// Returns an earlier access that `next` must wait for but does not.
  std::optional<Access> find_race(const Access& next, const StreamClocks& clocks) const;
  /// Returns an access by a stream other than `stream` that its next work may not wait for.
  std::optional<Access> find_open(size_t stream, const StreamClocks& clocks) const;
  void add(const Access& access, const StreamClocks& clocks);
  /// Marks accesses by this stream as known to the owner of the memory, which waits for them.
  void forgive(size_t stream);

 private:
  std::vector<Access> accesses_;
};

/// Returns a text such as "aten::mul reads bytes [0, 64) on stream 2".
std::string describe(const Access& access);

}  // namespace tessera::simulated_gpu
