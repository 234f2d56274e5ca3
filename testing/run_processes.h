#pragma once
// Runs a test body on several ranks that are processes over gloo. docs/semantics.md describes how.
//
//   run_processes(2, [](int rank) { expect_equal(get_rank(), rank); });  // testing/expect.h
//
// Code before the call runs in every rank too. Writes to captured variables are lost.

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Exit code of a rank that lacks the backend or a GPU for it; the test is then skipped.
constexpr int kSkippedExitCode = 72;

struct RunProcessesOptions {
  std::string backend = "gloo";                                       // of the default group; "fake" has no peers
  std::chrono::milliseconds timeout = std::chrono::seconds(60);       // of collectives
  std::vector<std::pair<std::string, std::string>> environment = {};  // additional variables
};

/// Exit status and output of the ranks.
struct ProcessesResult {
  int exit_code = 0;                      // see comm/launcher/local_launcher.h
  std::string message = {};               // "" on success
  bool skipped = false;                   // exit_code is kSkippedExitCode
  std::vector<std::string> outputs = {};  // of each rank
};

/// Throws Error with the first failed rank and all output, and warns if skipped. Call it in a Catch2 test's thread.
void run_processes(int world_size, const std::function<void(int rank)>& body, RunProcessesOptions options = {});

/// Like run_processes, but does not throw if a rank fails.
ProcessesResult try_run_processes(int world_size, const std::function<void(int rank)>& body,
                                  RunProcessesOptions options = {});

}  // namespace tessera
