// Ranks that outlive another one, as processes: they stay, and go on with its replacement, or without it.

#include "comm/run_elastic.h"

#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "base/error.h"
#include "base/open_files.h"
#include "comm/collectives.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "testing/temp_folder.h"
#include "testing/test_spec.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

using Catch::Matchers::ContainsSubstring;
using std::chrono::milliseconds;

constexpr int kSteps = 4;

/// What a rank of these tests does in a step, before the others' part of its collective is needed.
using Step = std::function<void(int step)>;

/// Makes steps 0 to kSteps, each a sum over all ranks, or goes on after those that an earlier start has made.
void count_steps(const std::string& folder, const std::string& backend, milliseconds timeout, const Step& before) {
  before(-1);
  init_process_group({.backend = backend, .timeout = timeout});
  fmt::print("start {} rank {} of {} pid {}\n", restart_count(), get_rank(), get_world_size(), getpid());
  std::fflush(stdout);
  int first = 0;
  std::ifstream(folder + "/steps") >> first;
  barrier(default_group());
  for (int step = first; step < kSteps; ++step) {
    before(step);
    const at::Tensor sum = at::full({1000}, static_cast<float>(get_rank() + 1));
    all_reduce(sum, ReduceOp::Sum, default_group());
    const int ranks = get_world_size();
    TESSERA_CHECK(Error, sum[0].item<int>() == ranks * (ranks + 1) / 2, "the sum is {}", sum[0].item<int>());
    if (get_rank() == 0) {
      std::ofstream(folder + "/new") << step + 1;
      std::filesystem::rename(folder + "/new", folder + "/steps");
    }
  }
  barrier(default_group());
  destroy_process_group();
}

struct Launched {
  LaunchResult result;
  std::vector<std::string> outputs;
  std::map<int, std::map<int, int>> pids;  // by start and rank

  std::string all() const {
    std::string text = result.message;
    for (const auto& output : outputs) {
      text += "\n---\n" + output;
    }
    return text;
  }
};

/// A rank comes to the test's first launch, whichever it belongs to: that one's values are in its environment.
std::string own_value(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Runs run_elastic(count_steps) in new processes with this test's name, which end here.
Launched launch_steps(LaunchOptions options, const Step& before, const std::string& backend = "shm",
                      milliseconds timeout = std::chrono::seconds(20)) {
  if (keeps_survivors()) {
    const int code = report_errors([&] {
      run_elastic([&] { count_steps(own_value("TEST_FOLDER"), own_value("TEST_BACKEND"), timeout, before); });
    });
    std::fflush(nullptr);
    std::_Exit(code);
  }
  const TempFolder folder;
  options.keep_survivors = true;
  options.argv = {std::filesystem::read_symlink("/proc/self/exe").string(),
                  exact_test_spec(Catch::getResultCapture().getCurrentTestName())};
  options.environment.emplace_back("TEST_FOLDER", folder.path());
  options.environment.emplace_back("TEST_BACKEND", backend);
  for (int rank = 0; rank < options.nproc; ++rank) {
    options.output_files.push_back(folder.path(fmt::format("output{}", rank)));
  }
  Launched launched;
  launched.result = launch_ranks(options);
  for (const auto& file : options.output_files) {
    launched.outputs.push_back(read_file(file));
    std::istringstream lines(launched.outputs.back());
    for (std::string line; std::getline(lines, line);) {
      int start = 0, rank = 0, ranks = 0, pid = 0;
      if (std::sscanf(line.c_str(), "start %d rank %d of %d pid %d", &start, &rank, &ranks, &pid) == 4) {
        launched.pids[start][rank] = pid;
      }
    }
  }
  return launched;
}

bool is_rank(int rank, int start) {
  return own_value("RANK") == std::to_string(rank) && restart_count() == start;
}

void die_at(int rank, int start, int step, int at_step) {
  if (is_rank(rank, start) && step == at_step) {
    raise(SIGKILL);
  }
}

void hang() {
  std::this_thread::sleep_for(std::chrono::minutes(1));
}

TEST_CASE("a rank that dies in a step is replaced, and the processes of the others stay") {
  for (const char* const backend : {"shm", "gloo"}) {
    const auto launched = launch_steps(
        {.nproc = 3, .max_restarts = 1}, [](int step) { die_at(1, 0, step, 2); }, backend);
    INFO(launched.all());
    CHECK(launched.result.exit_code == 0);
    CHECK(launched.result.restarts == 1);
    auto before = launched.pids.at(0), after = launched.pids.at(1);
    CHECK(before.size() == 3);
    CHECK(after.size() == 3);
    CHECK(after.at(0) == before.at(0));
    CHECK(after.at(1) != before.at(1));
    CHECK(after.at(2) == before.at(2));
    CHECK_THAT(launched.outputs.at(0), ContainsSubstring("the process stays"));
  }
}

TEST_CASE("two ranks that die at once are replaced together") {
  const auto launched = launch_steps({.nproc = 4, .max_restarts = 2}, [](int step) {
    die_at(0, 0, step, 1);
    die_at(3, 0, step, 1);
  });
  INFO(launched.all());
  CHECK(launched.result.exit_code == 0);
  CHECK(launched.result.restarts == 1);
  auto before = launched.pids.at(0), after = launched.pids.at(1);
  CHECK(after.at(0) != before.at(0));
  CHECK(after.at(1) == before.at(1));
  CHECK(after.at(2) == before.at(2));
  CHECK(after.at(3) != before.at(3));
}

TEST_CASE("a rank that dies before it has met the survivors is replaced again") {
  for (const int rank : {0, 1}) {  // the one that gathers the others, and another
    const auto launched = launch_steps(
        {.nproc = 3, .max_restarts = 2, .environment = {{"TEST_VICTIM", std::to_string(rank)}}}, [](int step) {
          const int victim = std::atoi(own_value("TEST_VICTIM").c_str());
          die_at(victim, 0, step, 1);
          die_at(victim, 1, step, -1);
        });
    INFO(launched.all());
    CHECK(launched.result.exit_code == 0);
    CHECK(launched.result.restarts == 2);
    CHECK(launched.pids.at(2).at(2) == launched.pids.at(0).at(2));
    CHECK(launched.pids.at(2).at(1 - rank) == launched.pids.at(0).at(1 - rank));
  }
}

TEST_CASE("survivors go on without a rank that fails at each start, and the last one takes its place") {
  const auto launched = launch_steps({.nproc = 3, .max_restarts = 3, .min_ranks = 2}, [](int step) {
    if (step == -1 && own_value("RANK") == "1" && restart_count() < 2) {
      throw Error("no GPU");
    }
  });
  INFO(launched.all());
  CHECK(launched.result.exit_code == 0);
  CHECK(launched.result.restarts == 2);
  CHECK(launched.result.nproc == 2);
  REQUIRE(launched.pids.contains(2));
  CHECK(launched.pids.at(2).size() == 2);
  CHECK_THAT(launched.outputs.at(2), ContainsSubstring("start 2 rank 1 of 2"));
}

TEST_CASE("a survivor that has hung is killed and replaced, too") {
  const auto start = std::chrono::steady_clock::now();
  const auto launched =
      launch_steps({.nproc = 3, .max_restarts = 1, .regroup_timeout = milliseconds(500)}, [](int step) {
        die_at(2, 0, step, 1);
        if (is_rank(1, 0) && step == 1) {
          hang();
        }
      });
  INFO(launched.all());
  CHECK(launched.result.exit_code == 0);
  CHECK(launched.result.restarts == 1);
  CHECK(launched.pids.at(1).at(0) == launched.pids.at(0).at(0));
  CHECK(launched.pids.at(1).at(1) != launched.pids.at(0).at(1));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
}

TEST_CASE("a rank that has hung is replaced once the others' collective times out") {
  const auto launched = launch_steps(
      {.nproc = 2, .max_restarts = 1, .regroup_timeout = milliseconds(300)},
      [](int step) {
        if (is_rank(1, 0) && step == 1) {
          hang();
        }
      },
      "shm", std::chrono::seconds(2));
  INFO(launched.all());
  CHECK(launched.result.exit_code == 0);
  CHECK(launched.result.restarts == 1);
  CHECK(launched.pids.at(1).at(0) == launched.pids.at(0).at(0));
  CHECK(launched.pids.at(1).at(1) != launched.pids.at(0).at(1));
}

TEST_CASE("a user's error ends the launch, though survivors wait") {
  const auto fail_with = [](const auto& error) {
    return [=](int step) {
      if (is_rank(1, 0) && step == 1) {
        throw error;
      }
    };
  };
  const auto wrong = launch_steps({.nproc = 3, .max_restarts = 3}, fail_with(ValueError("a wrong option")));
  INFO(wrong.all());
  CHECK(wrong.result.exit_code == kUserErrorExitCode);
  CHECK(wrong.result.restarts == 0);
  CHECK_THAT(wrong.result.message, ContainsSubstring("a restart would not help"));
}

TEST_CASE("a launch whose restarts are used up ends, though all ranks wait") {
  const auto launched = launch_steps({.nproc = 2, .max_restarts = 1}, [](int step) {
    if (is_rank(1, restart_count()) && step == 0) {
      throw CommError("the network is down");
    }
  });
  INFO(launched.all());
  CHECK(launched.result.exit_code == 1);
  CHECK(launched.result.restarts == 1);
  CHECK_THAT(launched.result.message, ContainsSubstring("all 1 restarts are used up"));
}

/// What a process holds of the system.
struct Holdings {
  int files = 0, threads = 0, mappings = 0, resident_kib = 0;
};

Holdings count_holdings() {
  namespace fs = std::filesystem;
  Holdings holdings{.files = static_cast<int>(tessera::open_files().size())};
  holdings.threads =
      static_cast<int>(std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator()));
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    ++holdings.mappings;
  }
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmRSS:") {
      status >> holdings.resident_kib;
    }
  }
  return holdings;
}

TEST_CASE("regroups leave nothing behind") {
  constexpr int kRegroups = 20, kFirst = 5;
  for (const char* const backend : {"shm", "gloo"}) {
    static Holdings first;
    const auto launched = launch_steps(
        {.nproc = 3, .max_restarts = kRegroups},
        [](int step) {
          if (step == 0 && restart_count() == kFirst) {
            first = count_holdings();
          }
          if (step == 0 && restart_count() < kRegroups) {
            const auto pair = new_group({0, 1, 2}, "another");
            all_reduce(at::full({100'000}, 1.f), ReduceOp::Sum, pair);
            if (restart_count() % 3 == get_rank()) {
              throw CommError("as if another rank were lost");
            }
            barrier(pair);
          }
          if (step == 0 && restart_count() == kRegroups) {
            const Holdings last = count_holdings();
            fmt::print("files {} threads {} mappings {} kib {}\n", last.files - first.files,
                       last.threads - first.threads, last.mappings - first.mappings,
                       last.resident_kib - first.resident_kib);
          }
        },
        backend);
    INFO(launched.all());
    CHECK(launched.result.exit_code == 0);
    CHECK(launched.result.restarts == kRegroups);
    for (const auto& output : launched.outputs) {
      Holdings more;
      const auto line = output.find("files ");
      REQUIRE(line != std::string::npos);
      REQUIRE(std::sscanf(output.c_str() + line, "files %d threads %d mappings %d kib %d", &more.files, &more.threads,
                          &more.mappings, &more.resident_kib) == 4);
      CHECK(more.files <= 0);
      CHECK(more.threads <= 0);
      CHECK(more.mappings <= 8);  // malloc's
      CHECK(more.resident_kib <= 4096);
    }
  }
}

TEST_CASE("without a launcher that keeps survivors, run_elastic calls the function once") {
  int calls = 0;
  run_elastic([&] { ++calls; });
  CHECK(calls == 1);
  CHECK_THROWS_AS(run_elastic([&] { throw CommError("lost"); }), CommError);
  CHECK_FALSE(keeps_survivors());
  CHECK_THROWS_AS(launch_ranks({.nproc = 2, .keep_survivors = true}), ValueError);
}

}  // namespace
}  // namespace tessera::testing
