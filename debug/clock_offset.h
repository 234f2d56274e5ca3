#pragma once
// Measures the offset of a rank's clock from rank 0's.

#include <cstdint>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

/// Returns the system clock in nanoseconds since 1970.
int64_t clock_ns();

/// A rank's clock minus rank 0's, and the maximum error, in nanoseconds.
struct ClockOffset {
  int64_t ns = 0;
  int64_t error_ns = 0;
};

/// Times at which a rank called an all-gather and had its result, by its own clock.
struct ClockReading {
  int64_t before_ns = 0;
  int64_t after_ns = 0;
};

/// Estimates the offset from readings of the same all-gathers: each one ended only after every rank had started it.
//
//   rank 0:  [ 100, 130 ]   rank 1: [ 510, 525 ]    510 - 130 = 380 <= offset <= 525 - 100 = 425: 402 +- 23
ClockOffset offset_from_readings(const std::vector<ClockReading>& own, const std::vector<ClockReading>& of_rank_0);

/// Measures the offset with a few all-gathers. Collective over the group. Returns 0 on one host, which has one clock.
ClockOffset measure_clock_offset(const ProcessGroupPtr& group);

}  // namespace tessera
