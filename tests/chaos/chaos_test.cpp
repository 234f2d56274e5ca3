// Ranks of a training run that are killed at any moment: the run ends with the bits of one that was left alone.
// TESSERA_KILLS sets the number of kills (docs/reliability.md); TESSERA_CHAOS_RANKS, the most ranks, at least 3;
// TESSERA_CHAOS_SEED, when kills come.

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
  bool in_memory;        // has in-memory checkpoints
  bool keeps_survivors;  // ranks that are not killed stay
};
constexpr Setting kSettings[] = {{2, "shm", true, false},  {3, "gloo", false, true}, {2, "gloo", true, true},
                                 {3, "shm", false, false}, {3, "gloo", true, false}, {2, "shm", false, true},
                                 {3, "shm", true, true},   {2, "gloo", false, false}};

/// Of the i-th run: over 2 or 3 ranks, and up to `most_ranks` by turns.
Setting setting_of(size_t i, int most_ranks) {
  Setting setting = kSettings[i % std::size(kSettings)];
  setting.ranks += static_cast<int>(i) % (most_ranks - 2);
  return setting;
}

int read_variable(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

/// What a run's log says; checks what holds of each line.
class RunLog {
 public:
  std::map<int64_t, std::string> losses;  // by step
  std::set<int> killed_starts;
  std::map<Phase, int> kills;       // starts by the phase they ended in
  std::vector<double> recovery_ms;  // from a death to the next step
  int resumed = 0;                  // starts that found a checkpoint

  RunLog(const std::string& path, bool in_memory) : in_memory_(in_memory) {
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
    } else if (event == "saved" || event == "in_memory") {
      saved_ = std::max(saved_, number);
    } else if (event == "saving") {
      saving_ = number;
    } else if (event == "resumed") {
      CHECK(number >= saved_);  // no checkpoint is lost
      if (in_memory_) {         // and at most one step, or two during a save in the background
        CHECK(number + (saving_ > saved_ ? 2 : 1) >= std::ssize(losses));
      }
      resumed += number > 0 ? 1 : 0;
      has_resumed_ = true;
    } else {
      read_kill(fields, static_cast<int>(number));
    }
  }
  void read_step(std::istringstream& fields, int64_t step) {
    std::string loss;
    int64_t time = 0;
    fields >> loss >> time;
    CHECK(losses.emplace(step, loss).first->second == loss);  // a step that is made again gives the same
    if (killed_at_ > 0 && has_resumed_) {                     // before, it is one that was under way
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
      has_resumed_ = false;
    }
  }

  bool in_memory_;
  int64_t saving_ = 0, saved_ = 0;
  int64_t killed_at_ = 0;
  bool has_resumed_ = false;  // since then
};

LaunchResult train(const Setting& setting, const TempFolder& folder, int64_t steps, int kills, int seed) {
  std::vector<std::string> outputs;
  outputs.reserve(static_cast<size_t>(setting.ranks));
  for (int rank = 0; rank < setting.ranks; ++rank) {
    outputs.push_back(folder.path(fmt::format("output{}", rank)));
  }
  return launch_ranks({.nproc = setting.ranks,
                       .max_restarts = kills,
                       .keep_survivors = setting.keeps_survivors && kills > 0,
                       .argv = {kProgram, folder.path(), setting.backend, std::to_string(steps), std::to_string(kills),
                                std::to_string(seed), setting.in_memory ? "memory" : "disk"},
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
  std::vector<double> recovery_ms = {};

  void add(const RunLog& log) {
    for (const auto& [phase, count] : log.kills) {
      kills[phase] += count;
    }
    starts_killed += static_cast<int>(log.killed_starts.size());
    resumed += log.resumed;
    recovery_ms.insert(recovery_ms.end(), log.recovery_ms.begin(), log.recovery_ms.end());
  }
  void print(const std::string& name) {
    if (recovery_ms.empty()) {
      return;
    }
    std::ranges::sort(recovery_ms);
    const auto at = [&](double share) {
      return recovery_ms[static_cast<size_t>(share * static_cast<double>(recovery_ms.size() - 1))];
    };
    std::printf("%s: %d starts killed:", name.c_str(), starts_killed);
    constexpr const char* kNames[] = {
        "start", "resume", "forward", "backward", "optimizer", "checkpoint", "in-memory checkpoint"};
    for (const auto& [phase, count] : kills) {
      std::printf(" %d in %s,", count, kNames[static_cast<int>(phase)]);
    }
    std::printf(" %d resumed; from a death to the next step: median %.0f ms, p99 %.0f ms, max %.0f ms\n", resumed,
                at(0.5), at(0.99), recovery_ms.back());
  }
};

/// Trains with kills, and compares with a run that is left alone.
RunLog check_run(const Setting& setting, int kills, int seed) {
  INFO(fmt::format("{} ranks, {}, {}, {}, {} kills, seed {}", setting.ranks, setting.backend,
                   setting.in_memory ? "in memory" : "on disk",
                   setting.keeps_survivors ? "survivors stay" : "all start", kills, seed));
  const int64_t steps = 3 * kills + 4;
  const TempFolder calm, chaos;
  REQUIRE(train(setting, calm, steps, 0, 0).exit_code == 0);
  const LaunchResult result = train(setting, chaos, steps, kills, seed);
  const RunLog expected(calm.path("log"), setting.in_memory);
  RunLog log(chaos.path("log"), setting.in_memory);
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
  const int most_ranks = read_variable("TESSERA_CHAOS_RANKS", 3);
  REQUIRE(most_ranks >= 3);
  int seed = read_variable("TESSERA_CHAOS_SEED", 1);
  std::map<std::string, Total> totals;
  int killed = 0, resumed = 0;
  for (size_t i = 0; killed < wanted; ++i, ++seed) {
    const Setting setting = setting_of(i, most_ranks);
    const RunLog log = check_run(setting, std::min({kKillsOfARun, wanted - killed, (wanted + 1) / 2}), seed);
    totals[fmt::format("{}, {}", setting.in_memory ? "also in memory" : "checkpoints on disk",
                       setting.keeps_survivors ? "survivors stay" : "all ranks start again")]
        .add(log);
    killed += static_cast<int>(log.killed_starts.size());
    resumed += log.resumed;
    REQUIRE(i < 100 + static_cast<size_t>(wanted));  // kills that do not come
  }
  CHECK(resumed > 0);
  for (auto& [name, total] : totals) {
    total.print(name);
  }
}

TEST_CASE("survivors of a death in each phase go on, and end with the bits of a run that was left alone") {
  const RunLog log = check_run({.ranks = 3, .backend = "shm", .in_memory = true, .keeps_survivors = true}, kPhases, 0);
  CHECK(log.kills.size() == kPhases);
}

}  // namespace tessera::testing
