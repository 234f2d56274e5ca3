#pragma once
// The distance of an axis's ticks, for pictures.

#include <cmath>

namespace tessera {

/// Returns the smallest of 1, 2, 5 x 10^k that divides `range`, above 0, into at most `most` parts.
inline double tick_distance(double range, int most) {
  const double power = std::pow(10.0, std::floor(std::log10(range / most)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (range / (factor * power) <= most) {
      return factor * power;
    }
  }
  return 10 * power;
}

}  // namespace tessera
