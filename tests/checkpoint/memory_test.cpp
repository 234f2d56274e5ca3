// In-memory checkpoints: which of them a run resumes from, and what a run that went back leaves of them.

#include <filesystem>
#include <future>

#include "checkpoint/checkpointer.h"
#include "comm/collectives.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "tests/checkpoint/layouts.h"
#include "tests/reference/captured_warnings.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// A run whose checkpoints are in a folder, and in a memory of all runs there.
struct Run {
  Run(const TempFolder& folder, const TestLayout& layout, const std::string& name = "run")
      : checkpointer(folder.path(name), {.memory_folder = folder.path("memory")}), trainer(layout, /*seed=*/1) {}

  /// Returns the step that it goes on from, with which the saved value agrees.
  int64_t resume() {
    dcp::StateDict user = {{"position", int64_t{0}}};
    const int64_t step = checkpointer.resume_or_start(trainer.model, trainer.optimizer, user);
    expect_equal(std::get<int64_t>(user.at("position")), 10 * step);
    return step;
  }
  dcp::State state(int64_t step) {
    return dcp::training_state(trainer.model, trainer.optimizer, {{"position", 10 * step}});
  }
  void save(int64_t step) { checkpointer.save(step, state(step)); }
  void save_in_memory(int64_t step) { checkpointer.save_in_memory(step, state(step)); }

  dcp::Checkpointer checkpointer;
  TestTrainer trainer;
};

/// Of the only run.
std::string memory_of_run(const TempFolder& folder) {
  const auto runs = names_in(folder.path("memory"));
  expect_equal(runs.size(), size_t{1});
  return folder.path("memory/" + runs.at(0));
}

}  // namespace

TEST_CASE("a run resumes from its in-memory checkpoint where that is newest, on any number of ranks") {
  const TempFolder folder;
  double next_loss = 0;  // of the run that is left alone
  run_ranks(4, [&](int rank) {
    Run run(folder, test_layout("2x2 HSDP"));
    for (const int64_t step : {1, 2, 3}) {
      run.trainer.train(step);
      run.save_in_memory(step);
      if (step == 2) {
        run.save(step);
      }
    }
    const double loss = run.trainer.train(4);
    barrier(default_group());
    if (rank == 0) {
      next_loss = loss;
      expect_equal(names_in(memory_of_run(folder)), std::vector<std::string>{"step-00000003"});
    }
  });
  for (const auto* layout : {"2x2 HSDP", "3", "1"}) {
    run_ranks(test_layout(layout).ranks, [&](int) {
      Run run(folder, test_layout(layout));
      expect_equal(run.resume(), int64_t{3});
      expect_equal(run.trainer.train(4), next_loss);
    });
  }
  run_ranks(2, [&](int) {
    Run run(folder, test_layout("2"));
    run.save(4);
    expect_equal(Run(folder, test_layout("2")).resume(), int64_t{4});
    expect_equal(Run(folder, test_layout("2"), "another run").resume(), int64_t{0});
    expect_equal(*dcp::Checkpointer(folder.path("run"), {.memory_folder = folder.path("other")}).latest_valid(),
                 folder.path("run/step-00000004"));
  });
}

TEST_CASE("where the in-memory checkpoint is damaged or incomplete, the one on disk is taken") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    Run run(folder, test_layout("2"));
    run.save(1);
    run.save_in_memory(2);
    const auto memory = memory_of_run(folder);
    barrier(default_group());
    if (rank == 0) {
      std::filesystem::copy(memory + "/step-00000002", memory + "/step-00000003.incomplete-1");
      write_file(memory + "/step-00000002/tessera.json", "{");
    }
    barrier(default_group());
    const CapturedWarnings warnings;
    Run other(folder, test_layout("2"));
    expect_equal(other.resume(), int64_t{1});
    expect_equal(warnings.texts().size(), rank == 0 ? size_t{1} : size_t{0});
    other.save_in_memory(2);  // in place of the damaged one
    expect_equal(Run(folder, test_layout("2")).resume(), int64_t{2});
    barrier(default_group());
    expect_equal(names_in(memory), std::vector<std::string>{"step-00000002"});
  });
}

TEST_CASE("a run that went back resumes from what it saved since, in memory or on disk") {
  for (const bool in_memory : {true, false}) {
    const TempFolder folder;
    run_ranks(2, [&](int) {
      Run run(folder, test_layout("2"));
      run.save(1);
      run.save(5);
      run.save_in_memory(6);
      run.checkpointer.resume_at(1);
      expect_equal(*run.checkpointer.latest_valid(), run.checkpointer.checkpoint_path(1));
      const CapturedWarnings warnings;  // of what is set aside
      in_memory ? run.save_in_memory(2) : run.save(2);
      expect_equal(Run(folder, test_layout("2")).resume(), int64_t{2});
    });
  }
}

TEST_CASE("save_in_memory neither waits for a save in flight nor disturbs it") {
  const TempFolder folder;
  run_ranks(2, [&](int) {
    Run run(folder, test_layout("2"));
    std::promise<void> in_memory_is_done;
    dcp::Checkpointer checkpointer(
        folder.path("run"),
        {.progress = [waits = in_memory_is_done.get_future().share()](const dcp::Progress&) { waits.wait(); },
         .memory_folder = folder.path("memory")});
    checkpointer.async_save(1, run.state(1));
    checkpointer.save_in_memory(2, run.state(2));
    in_memory_is_done.set_value();
    checkpointer.wait();
    expect_equal(*checkpointer.latest(), checkpointer.checkpoint_path(1));
    expect_equal(run.resume(), int64_t{2});
  });
}

TEST_CASE("save_in_memory without a folder in memory, or with different ones") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    const dcp::State state{.user = {{"step", int64_t{1}}}};
    expect_throws<StateError>([&] { dcp::Checkpointer(folder.path("run")).save_in_memory(1, state); },
                              "there is no memory_folder; launch_local makes job_memory_folder()");
    expect_throws<ValueError>(
        [&] {
          dcp::Checkpointer(folder.path("run"), {.memory_folder = folder.path(rank == 0 ? "memory" : "other")})
              .save_in_memory(1, state);
        },
        "the ranks differ in the path");
  });
  CHECK(names_in(folder.path("")).empty());
}

}  // namespace tessera::testing
