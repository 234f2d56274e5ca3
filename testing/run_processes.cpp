#include "testing/run_processes.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/launcher/local_launcher.h"
#include "comm/nccl/cuda_devices.h"
#include "comm/process_group.h"
#include "testing/temp_folder.h"
#include "testing/test_spec.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

/// Set in a rank: the number of the call in the test case that it runs.
constexpr const char* kCallVariable = "TESSERA_TEST_CALL";
constexpr const char* kEndMark = "[rank ended well]\n";

// Returns the number of calls that this test case has made before, over all of its sections.
int count_call(const std::string& test_name) {
  static std::map<std::string, int> counts;
  return counts[test_name]++;
}

[[noreturn]] void end_rank(int exit_code) {
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(exit_code);
}

[[noreturn]] void be_rank(const std::function<void(int rank)>& body, const RunProcessesOptions& options) {
  try {
    init_process_group({.backend = options.backend, .timeout = options.timeout});
  } catch (const NotImplementedError& missing) {
    std::fprintf(stderr, "skipped: %s\n", missing.what());
    end_rank(kSkippedExitCode);
  } catch (const NoDeviceError& missing) {
    std::fprintf(stderr, "skipped: %s\n", missing.what());
    end_rank(kSkippedExitCode);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    end_rank(1);
  }
  try {
    barrier(default_group());
    body(get_rank());
    barrier(default_group());
    destroy_process_group();
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    end_rank(1);
  }
  std::fputs(kEndMark, stderr);
  end_rank(0);
}

std::vector<std::string> output_files(const testing::TempFolder& folder, int count) {
  std::vector<std::string> result;
  result.reserve(static_cast<size_t>(count));
  for (int rank = 0; rank < count; ++rank) {
    result.push_back(folder.path(fmt::format("rank{}", rank)));
  }
  return result;
}

}  // namespace

ProcessesResult try_run_processes(int world_size, const std::function<void(int rank)>& body,
                                  RunProcessesOptions options) {
  const std::string test_name = Catch::getResultCapture().getCurrentTestName();
  const int call = count_call(test_name);
  if (const char* own_call = std::getenv(kCallVariable)) {
    if (call == std::atoi(own_call)) {
      be_rank(body, options);
    }
    return {};
  }
  const testing::TempFolder folder;
  const std::vector<std::string> files = output_files(folder, world_size);
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  options.environment.emplace_back(kCallVariable, std::to_string(call));
  const LaunchResult launch = launch_ranks({.nproc = world_size,
                                            .argv = {program, testing::exact_test_spec(test_name)},
                                            .environment = options.environment,
                                            .output_files = files});
  ProcessesResult result = {
      .exit_code = launch.exit_code, .message = launch.message, .skipped = launch.exit_code == kSkippedExitCode};
  for (const std::string& file : files) {
    result.outputs.push_back(testing::read_file(file));
    const bool ended_well = result.outputs.back().find(kEndMark) != std::string::npos;
    if (result.exit_code == 0 && !ended_well) {
      result.exit_code = 1;
      result.message = fmt::format("rank {} never came to the call of run_processes", result.outputs.size() - 1);
    }
  }
  return result;
}

void run_processes(int world_size, const std::function<void(int rank)>& body, RunProcessesOptions options) {
  const ProcessesResult result = try_run_processes(world_size, body, options);
  if (result.exit_code == 0) {
    return;
  }
  if (result.skipped) {
    WARN("skipped: the ranks cannot have backend '" << options.backend << "'; rank 0 wrote:\n" << result.outputs.at(0));
    return;
  }
  std::string text = result.message;
  for (size_t rank = 0; rank < result.outputs.size(); ++rank) {
    text += fmt::format("\n--- rank {}\n{}", rank, result.outputs[rank]);
  }
  throw Error(text);
}

}  // namespace tessera
