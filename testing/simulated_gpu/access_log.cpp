#include "testing/simulated_gpu/access_log.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::simulated_gpu {

namespace {

bool must_be_ordered(const Access& a, const Access& b) {
  return a.begin < b.end && b.begin < a.end && (a.writes || b.writes);
}

/// Returns whether everything that must wait for `earlier` must also wait for `later`, which waited for it.
bool replaces(const Access& later, const Access& earlier) {
  return later.begin <= earlier.begin && earlier.end <= later.end && (later.writes || !earlier.writes);
}

}  // namespace

std::optional<Access> AccessLog::find_race(const Access& next, const StreamClocks& clocks) const {
  for (const Access& access : accesses_) {
    if (must_be_ordered(access, next) && !clocks.is_over(access.moment, next.moment.stream)) {
      return access;
    }
  }
  return std::nullopt;
}

std::optional<Access> AccessLog::find_open(size_t stream, const StreamClocks& clocks) const {
  for (const Access& access : accesses_) {
    if (!clocks.is_over(access.moment, stream)) {
      return access;
    }
  }
  return std::nullopt;
}

void AccessLog::add(const Access& access, const StreamClocks& clocks) {
  std::erase_if(accesses_, [&](const Access& earlier) {
    return replaces(access, earlier) && clocks.is_over(earlier.moment, access.moment.stream);
  });
  accesses_.push_back(access);
}

void AccessLog::forgive(size_t stream) {
  std::erase_if(accesses_, [&](const Access& access) { return access.moment.stream == stream; });
}

std::string describe(const Access& access) {
  return fmt::format("{} {} bytes [{}, {}) on stream {}", access.op, access.writes ? "writes" : "reads", access.begin,
                     access.end, access.moment.stream);
}

}  // namespace tessera::simulated_gpu
