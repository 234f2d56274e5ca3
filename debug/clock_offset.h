#pragma once
// Offset of a rank's clock from rank 0's.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

/// Returns the system's clock, in nanoseconds since 1970.
int64_t clock_ns();

/// A rank's clock minus rank 0's, in nanoseconds, and the largest error.
struct ClockOffset {
  int64_t ns = 0;
  int64_t error_ns = 0;
};

/// When a rank called an all-gather and when it had its result, by its clock.
struct ClockReading {
  int64_t before_ns = 0;
  int64_t after_ns = 0;
};

/// Returns the offset from readings of the same all-gathers: each ended after each rank had begun it.
//
//   rank 0:  [ 100, 130 ]   rank 1: [ 510, 525 ]    510 - 130 = 380 <= offset <= 525 - 100 = 425: 402 +- 23
ClockOffset offset_from_readings(const std::vector<ClockReading>& own, const std::vector<ClockReading>& of_rank_0);

/// Measures it by a few all-gathers. Collective over the group. Processes of one host have one clock: then it is 0.
ClockOffset measure_clock_offset(const ProcessGroupPtr& group);

}  // namespace tessera
