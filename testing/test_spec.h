#pragma once
// Test case specifications for Catch2's command line.

#include <string>

namespace tessera::testing {

/// Returns a specification that matches only the test case of this name.
std::string exact_test_spec(const std::string& test_name);

}  // namespace tessera::testing
