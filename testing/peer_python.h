#pragma once
// Runs scripts with the Python that PEER_PYTHON names, or that the build set up, to compare with PyTorch. The target
// needs env_inherit = ["PEER_PYTHON"], and data = the script and "@peer_python//:python".

#include <string>

namespace tessera::testing {

/// Runs `script`, a path below the repository. Returns false, with a note, if no Python could be set up. Throws
/// ExpectationError if Python cannot import `modules` or fails.
bool run_peer_python(const std::string& modules, const std::string& script, const std::string& arguments);

}  // namespace tessera::testing
