#pragma once
// Catch2's specifications of test cases, as they stand on a test program's command line.

#include <string>

namespace tessera::testing {

/// Returns a specification that matches the test case of this name only.
std::string exact_test_spec(const std::string& test_name);

}  // namespace tessera::testing
