#include "testing/peer_python.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <cstdlib>

#include "testing/expect.h"

namespace tessera::testing {

namespace {

/// Exit code of third_party/peer_python without a Python; the reason is on stderr.
constexpr int kNoPython = 77;

std::string peer_python() {
  const char* given = std::getenv("PEER_PYTHON");
  return given && *given ? given : "../peer_python/python";
}

void expect_success(int status, const std::string& command) {
  if (status != 0) {
    throw ExpectationError(fmt::format("{}: ended with {}", command, WIFEXITED(status) ? WEXITSTATUS(status) : status));
  }
}

}  // namespace

bool run_peer_python(const std::string& modules, const std::string& script, const std::string& arguments) {
  const auto probe = fmt::format("{} -c 'import {}'", peer_python(), modules);
  const int found = std::system(probe.c_str());
  if (WIFEXITED(found) && WEXITSTATUS(found) == kNoPython) {
    fmt::print("SKIPPED: {} {}\n", script, arguments);
    return false;
  }
  expect_success(found, probe);
  // Lets later scripts of this test reuse compiled imports; a sandbox can write nowhere else.
  if (const char* own_folder = std::getenv("TEST_TMPDIR")) {
    setenv("PYTHONPYCACHEPREFIX", fmt::format("{}/peer_python", own_folder).c_str(), /*replace=*/0);
  }
  const auto command = fmt::format("{} {} {}", peer_python(), script, arguments);
  expect_success(std::system(command.c_str()), command);
  return true;
}

}  // namespace tessera::testing
