// Ranks that are killed at any moment of saving: the last checkpoint that was whole stays loadable, and the next run
// goes on from it. TESSERA_CRASHES raises the number of kills.

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>

#include "checkpoint/checkpointer.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "tests/checkpoint/layouts.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr const char* kFolderVariable = "TESSERA_CRASH_FOLDER";
constexpr int64_t kRows = 3001;

int crash_count() {
  const char* text = std::getenv("TESSERA_CRASHES");
  return text ? std::atoi(text) : 5;
}

/// The folder of the test's first process; the ranks it starts find it in the environment.
std::string shared_folder(const TempFolder& own) {
  setenv(kFolderVariable, own.path("run").c_str(), /*overwrite=*/0);
  return std::getenv(kFolderVariable);
}

at::Tensor expected(int64_t step) {
  return at::full({kRows, 50}, static_cast<double>(step));
}

/// Goes on from the latest checkpoint and saves step after step, until a rank is killed.
void save_until_killed(const std::string& folder, int rank, int trial) {
  const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
  const auto w = distribute_tensor(at::zeros({kRows, 50}), mesh, {Shard(0)});
  dcp::State state{.model = {{"w", w}}, .user = {{"step", int64_t{0}}}};
  dcp::Checkpointer checkpointer(folder, {.keep_last = 2});
  try {
    if (const auto path = checkpointer.latest()) {
      dcp::load(*path, state);
      expect_bit_equal(full_tensor(w), expected(std::get<int64_t>(state.user["step"])));
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "CANNOT GO ON: %s\n", error.what());
    throw;
  }
  // The first trial may be killed in its first save; after it there is a checkpoint to lose, however slow the machine.
  auto& saved_step = std::get<int64_t>(state.user["step"]);
  if (trial > 0 && saved_step == 0) {
    w.fill_(1);
    saved_step = 1;
    checkpointer.save(1, state);
  }
  std::mt19937_64 random(static_cast<uint64_t>(trial));
  const int victim = static_cast<int>(random() % 2);
  const auto delay = std::chrono::microseconds(random() % 60000);
  std::thread killer;
  if (rank == victim) {
    killer = std::thread([delay] {
      std::this_thread::sleep_for(delay);
      kill(getpid(), SIGKILL);
    });
    killer.detach();
  }
  for (int64_t step = saved_step + 1;; ++step) {
    w.fill_(static_cast<double>(step));
    saved_step = step;
    trial % 2 == 0 ? checkpointer.save(step, state) : checkpointer.async_save(step, state);
  }
}

}  // namespace

TEST_CASE("a rank that is killed at a random moment leaves a checkpoint that loads") {
  const TempFolder own;
  const auto folder = shared_folder(own);
  int killed = 0;
  std::vector<std::string> outputs;
  for (int trial = 0; trial < crash_count(); ++trial) {
    const auto result = try_run_processes(2, [&](int rank) { save_until_killed(folder, rank, trial); },
                                          {.timeout = std::chrono::seconds(20)});
    killed += result.exit_code == 128 + SIGKILL;
    outputs.insert(outputs.end(), result.outputs.begin(), result.outputs.end());
  }
  for (const auto& output : outputs) {
    INFO(output);
    CHECK(output.find("CANNOT GO ON") == std::string::npos);
  }
  CHECK(killed == crash_count());
  int checkpoints = 0;
  for (const auto& name : names_in(folder)) {
    if (name.find(".incomplete-") == std::string::npos) {
      dcp::State state{.model = {{"w", at::zeros({kRows, 50})}}, .user = {{"step", int64_t{0}}}};
      dcp::load(folder + "/" + name, state);
      expect_bit_equal(std::get<at::Tensor>(state.model["w"]), expected(std::get<int64_t>(state.user["step"])));
      ++checkpoints;
    }
  }
  CHECK(checkpoints >= 1);
}

}  // namespace tessera::testing
