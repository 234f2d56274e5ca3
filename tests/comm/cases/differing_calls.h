#pragma once
// Ranks that are processes and call what does not belong together.

#include <string>

namespace tessera::testing {

/// Each of two ranks has an error that says what it called, for calls that differ in one way or another. Starts
/// processes, as the cases of tests/comm/cases/process_backend_cases.h do.
void check_calls_that_differ(const std::string& backend);

}  // namespace tessera::testing
