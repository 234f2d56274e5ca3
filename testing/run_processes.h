#pragma once
// Runs a test body on several ranks that are processes over gloo.
//
//   TEST_CASE("gloo adds") {
//     run_processes(2, [](int rank) {
//       at::Tensor x = at::full({3}, float(rank));
//       all_reduce(x, ReduceOp::Sum, default_group());
//       expect_equal(x[0].item<float>(), 1.f);                  // testing/expect.h
//     });
//   }
//
// In each rank: set-up, a barrier, the body, a barrier, destroy_process_group().
//
// Each rank is this test binary once more, told to run this test case only; when it comes to the same call it sets up
// the default group, runs the body and ends. So what stands before the call runs in every rank as well, and must not
// depend on chance. Nothing that the body writes to captured variables comes back.

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// A rank ends with it where the backend is not part of this build, or a rank has no GPU for it: the test is skipped,
/// and has not failed.
constexpr int kSkippedExitCode = 72;

struct RunProcessesOptions {
  /// Of the default group; "fake" gives ranks without peers.
  std::string backend = "gloo";
  /// How long a collective waits for its peers.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// Variables that the ranks have beside this process's.
  std::vector<std::pair<std::string, std::string>> environment = {};
};

/// How the ranks ended.
struct ProcessesResult {
  /// As in comm/launch/local_launcher.h: 0 and "" if all ended well.
  int exit_code = 0;
  std::string message = {};
  /// Whether the ranks found that they cannot have the backend; exit_code is then kSkippedExitCode.
  bool skipped = false;
  /// What each rank wrote.
  std::vector<std::string> outputs = {};
};

/// Throws Error with the rank that failed first and what the ranks wrote; warns where the test is skipped. Call it from
/// a Catch2 test case's thread.
void run_processes(int world_size, const std::function<void(int rank)>& body, RunProcessesOptions options = {});

/// The same for bodies that are meant to fail: throws nothing for a rank that fails.
ProcessesResult try_run_processes(int world_size, const std::function<void(int rank)>& body,
                                  RunProcessesOptions options = {});

}  // namespace tessera
