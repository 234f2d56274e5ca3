#pragma once
// Steps of a run that are looked at, from one to another.

#include <cstdint>
#include <string>

namespace tessera {

/// Steps are counted from 1; both are part of it.
struct StepRange {
  int64_t first = 10;
  int64_t last = 12;
};

/// Throws ValueError, which begins with `where`, unless the first step is above 0 and the last not before it.
void check_step_range(const std::string& where, const StepRange& steps);

/// Parses "10-12" or "10". Throws ValueError, which begins with `option`.
StepRange parse_step_range(const std::string& option, const std::string& text);

}  // namespace tessera
