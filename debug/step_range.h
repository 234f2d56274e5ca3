#pragma once
// Range of a run's steps to examine.

#include <cstdint>
#include <string>

namespace tessera {

/// First and last step, inclusive, counted from 1.
struct StepRange {
  int64_t first = 10;
  int64_t last = 12;
};

/// Throws ValueError, with a message that begins with `where`, unless 1 <= first <= last.
void check_step_range(const std::string& where, const StepRange& steps);

/// Parses "10-12" or "10". Throws ValueError with a message that begins with `option`.
StepRange parse_step_range(const std::string& option, const std::string& text);

}  // namespace tessera
