#include "debug/step_range.h"

#include <charconv>

#include "base/error.h"

namespace tessera {

void check_step_range(const std::string& where, const StepRange& steps) {
  TESSERA_CHECK(ValueError, steps.first > 0 && steps.last >= steps.first,
                "{}: steps {} to {}; steps are counted from 1, and the last is not before the first", where,
                steps.first, steps.last);
}

StepRange parse_step_range(const std::string& option, const std::string& text) {
  StepRange steps{.first = 0};
  const char* const end = text.data() + text.size();
  auto parsed = std::from_chars(text.data(), end, steps.first);
  steps.last = steps.first;
  if (parsed.ec == std::errc() && parsed.ptr != end && *parsed.ptr == '-') {
    parsed = std::from_chars(parsed.ptr + 1, end, steps.last);
  }
  TESSERA_CHECK(
      ValueError, parsed.ec == std::errc() && parsed.ptr == end && steps.first > 0 && steps.last >= steps.first,
      "{} {}: must be a step, as 10, or steps from one to another, as 10-12; they are counted from 1", option, text);
  return steps;
}

}  // namespace tessera
