#pragma once
// A Python with PyTorch, for tests that compare with it: PEER_PYTHON, or the one that the build sets up where it can.
// The test's target has env_inherit = ["PEER_PYTHON"], and data = the script and "@peer_python//:python".

#include <string>

namespace tessera::testing {

/// Runs `script`, a path below the repository. False, with a line that says so, where the set-up had no Python that
/// could run it. Throws ExpectationError where there is one that cannot import `modules`, or that fails.
bool run_peer_python(const std::string& modules, const std::string& script, const std::string& arguments);

}  // namespace tessera::testing
