// Ranks of a training run that are killed at any moment: the run ends with the bits of one that was left alone.
// TESSERA_KILLS sets the number of kills (docs/reliability.md); TESSERA_CHAOS_SEED, when they come.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "comm/local_launcher.h"
#include "testing/temp_folder.h"
#include "tests/chaos/chaos_log.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

constexpr const char* kProgram = "tests/chaos/training_run";
constexpr int kKillsOfARun = 20;  // at most

struct Setting {
  int ranks;
  const char* backend;
};
constexpr Setting kSettings[] = {{2, "shm"}, {3, "gloo"}, {3, "shm"}, {2, "gloo"}};

int read_variable(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

/// What a run's log says; checks what holds of each line.
struct RunLog {
  std::map<int64_t, std::string> losses;  // by step
  std::set<int> killed_starts;
  std::map<Phase, int> kills;       // starts by the phase they ended in
  std::vector<double> recovery_ms;  // from a death to the next step
  int resumed = 0;                  // starts that found a checkpoint

  explicit RunLog(const std::string& path) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
      read_line(line);
    }
  }

 private:
  void read_line(const std::string& line) {
    INFO(line);
    std::istringstream fields(line);
    std::string event;
    int64_t number = 0;
    fields >> event >> number;
    if (event == "step") {
      read_step(fields, number);
    } else if (event == "saved") {
      saved_ = number;
    } else if (event == "resumed") {
      CHECK(number >= saved_);  // no checkpoint is lost
      resumed += number > 0 ? 1 : 0;
    } else {
      read_kill(fields, static_cast<int>(number));
    }
  }
  void read_step(std::istringstream& fields, int64_t step) {
    std::string loss;
    int64_t time = 0;
    fields >> loss >> time;
    CHECK(losses.emplace(step, loss).first->second == loss);  // a step that is made again gives the same
    if (killed_at_ > 0) {
      recovery_ms.push_back(static_cast<double>(time - killed_at_) / 1e6);
      killed_at_ = 0;
    }
  }
  void read_kill(std::istringstream& fields, int start) {
    int rank = 0, phase = 0;
    int64_t time = 0;
    fields >> rank >> phase >> time;
    if (killed_starts.insert(start).second) {
      ++kills[static_cast<Phase>(phase)];
      killed_at_ = time;
    }
  }

  int64_t saved_ = 0;
  int64_t killed_at_ = 0;
};

LaunchResult train(const Setting& setting, const TempFolder& folder, int64_t steps, int kills, int seed) {
  std::vector<std::string> outputs;
  outputs.reserve(static_cast<size_t>(setting.ranks));
  for (int rank = 0; rank < setting.ranks; ++rank) {
    outputs.push_back(folder.path(fmt::format("output{}", rank)));
  }
  return launch_ranks({.nproc = setting.ranks,
                       .max_restarts = kills,
                       .argv = {kProgram, folder.path(), setting.backend, std::to_string(steps), std::to_string(kills),
                                std::to_string(seed)},
                       .output_files = outputs});
}

/// The bytes of the last checkpoint, by file.
std::map<std::string, std::string> read_last_checkpoint(const TempFolder& folder, int64_t steps) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path(fmt::format("step-{:08}", steps)))) {
    files[entry.path().filename().string()] = read_file(entry.path().string());
  }
  return files;
}

struct Total {
  std::map<Phase, int> kills;
  int starts_killed = 0;
  int resumed = 0;
  std::vector<double> recovery_ms;

  void add(const RunLog& log) {
    for (const auto& [phase, count] : log.kills) {
      kills[phase] += count;
    }
    starts_killed += static_cast<int>(log.killed_starts.size());
    resumed += log.resumed;
    recovery_ms.insert(recovery_ms.end(), log.recovery_ms.begin(), log.recovery_ms.end());
  }
  void print() {
    std::ranges::sort(recovery_ms);
    const auto at = [&](double share) {
      return recovery_ms[static_cast<size_t>(share * static_cast<double>(recovery_ms.size() - 1))];
    };
    std::printf("%d starts killed:", starts_killed);
    constexpr const char* kNames[] = {"start", "resume", "forward", "backward", "optimizer", "checkpoint"};
    for (const auto& [phase, count] : kills) {
      std::printf(" %d in %s,", count, kNames[static_cast<int>(phase)]);
    }
    std::printf(" %d resumed; from a death to the next step: median %.0f ms, p99 %.0f ms, max %.0f ms\n", resumed,
                at(0.5), at(0.99), recovery_ms.back());
  }
};

/// Trains with kills, and compares with a run that is left alone.
RunLog check_run(const Setting& setting, int kills, int seed) {
  INFO(fmt::format("{} ranks, {}, {} kills, seed {}", setting.ranks, setting.backend, kills, seed));
  const int64_t steps = 3 * kills + 4;
  const TempFolder calm, chaos;
  REQUIRE(train(setting, calm, steps, 0, 0).exit_code == 0);
  const LaunchResult result = train(setting, chaos, steps, kills, seed);
  const RunLog expected(calm.path("log"));
  RunLog log(chaos.path("log"));
  for (int rank = 0; rank < setting.ranks; ++rank) {
    const std::string output = read_file(chaos.path(fmt::format("output{}", rank)));
    INFO(output);
    CHECK(output.find("is damaged") == std::string::npos);
    CHECK(result.exit_code == 0);
  }
  INFO(read_file(chaos.path("log")));
  // Each restart is due to a kill: none to a rank that failed by itself, or waited in vain. The last may come too late.
  CHECK(result.restarts <= static_cast<int>(log.killed_starts.size()));
  CHECK(result.restarts + 1 >= static_cast<int>(log.killed_starts.size()));
  CHECK(log.losses == expected.losses);
  CHECK(read_last_checkpoint(chaos, steps) == read_last_checkpoint(calm, steps));
  return log;
}

}  // namespace

TEST_CASE("a run whose ranks are killed at any moment ends with the bits of one that was left alone") {
  const int wanted = read_variable("TESSERA_KILLS", 6);
  int seed = read_variable("TESSERA_CHAOS_SEED", 1);
  Total total;
  for (size_t i = 0; total.starts_killed < wanted; ++i, ++seed) {
    const int left = wanted - total.starts_killed;
    total.add(check_run(kSettings[i % std::size(kSettings)], std::min({kKillsOfARun, left, (wanted + 1) / 2}), seed));
    REQUIRE(i < 100 + static_cast<size_t>(wanted));  // kills that do not come
  }
  CHECK(total.resumed > 0);
  total.print();
}

}  // namespace tessera::testing
