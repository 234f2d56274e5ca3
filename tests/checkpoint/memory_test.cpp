// In-memory checkpoints: which of them a run resumes from, and what a run that went back leaves of them.

#include <fmt/format.h>

#include <cstring>
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

/// A run whose checkpoints are in a folder, and in a memory of all runs there, such as a host's.
struct Run {
  Run(const TempFolder& folder, const TestLayout& layout, const std::string& name = "run",
      const std::string& memory = "memory")
      : checkpointer(folder.path(name), {.memory_folder = folder.path(memory)}), trainer(layout, /*seed=*/1) {}

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

/// Numbers of ranks by host; ranks are assigned in order.
using RanksOfHosts = std::vector<int>;

std::string host_of(int rank, const RanksOfHosts& hosts) {
  size_t host = 0;
  for (int end = hosts[0]; rank >= end; end += hosts[host]) {
    ++host;
  }
  return fmt::format("host{}", host);
}

/// Saves in memory on all hosts, and resumes after some have been lost with it, on another layout. Returns the step.
int64_t resume_after_loss(const char* saved, const RanksOfHosts& hosts, const std::vector<std::string>& lost,
                          const char* resumed, const RanksOfHosts& hosts_then) {
  const TempFolder folder;
  double next_loss = 0;
  run_ranks(test_layout(saved).ranks, [&](int rank) {
    Run run(folder, test_layout(saved), "run", host_of(rank, hosts));
    for (const int64_t step : {1, 2, 3}) {
      run.trainer.train(step);
      step == 1 ? run.save(step) : run.save_in_memory(step);
    }
    const double loss = run.trainer.train(4);
    next_loss = rank == 0 ? loss : next_loss;
  });
  for (const auto& host : lost) {
    std::filesystem::remove_all(folder.path(host));
  }
  int64_t step = 0;
  run_ranks(test_layout(resumed).ranks, [&](int rank) {
    Run run(folder, test_layout(resumed), "run", host_of(rank, hosts_then));
    const int64_t own = run.resume();
    if (own == 3) {
      expect_equal(run.trainer.train(4), next_loss);
    }
    run.save_in_memory(own + 1);  // in place of what was there
    expect_equal(Run(folder, test_layout(resumed), "run", host_of(rank, hosts_then)).resume(), own + 1);
    barrier(default_group());
    step = rank == 0 ? own : step;
  });
  return step;
}

TEST_CASE("in-memory checkpoints of several hosts survive the loss of any one host, but not of two neighbours") {
  for (const auto* const lost : {"host0", "host1"}) {
    CHECK(resume_after_loss("2x2 HSDP", {2, 2}, {lost}, "2x2 HSDP", {2, 2}) == 3);
    CHECK(resume_after_loss("3", {2, 1}, {lost}, "2", {1, 1}) == 3);
  }
  for (const auto* const lost : {"host0", "host1", "host2"}) {
    CHECK(resume_after_loss("3", {1, 1, 1}, {lost}, "3", {1, 1, 1}) == 3);
  }
  CHECK(resume_after_loss("3", {1, 1, 1}, {}, "1", {1}) == 1);  // one host of three is left
  CHECK(resume_after_loss("3", {1, 1, 1}, {"host1", "host2"}, "3", {1, 1, 1}) == 1);
}

TEST_CASE("a host with a damaged or an older in-memory checkpoint gets the data of another host") {
  const TempFolder folder;
  run_ranks(4, [&](int rank) {
    const RanksOfHosts hosts = {2, 2};
    const auto new_run = [&] { return Run(folder, test_layout("2x2 HSDP"), "run", host_of(rank, hosts)); };
    Run run = new_run();
    run.save_in_memory(2);
    barrier(default_group());
    if (rank == 0) {
      const auto memory = folder.path("host1/" + names_in(folder.path("host1")).at(0));
      for (const auto& name : names_in(memory + "/step-00000002")) {
        if (name.ends_with(".safetensors")) {  // all but its header, which has its length in front
          const auto file = memory + "/step-00000002/" + name;
          const std::string text = read_file(file);
          uint64_t header = 0;
          std::memcpy(&header, text.data(), sizeof header);
          write_file(file,
                     text.substr(0, sizeof header + header) + std::string(text.size() - sizeof header - header, 'x'));
        }
      }
    }
    barrier(default_group());
    expect_equal(new_run().resume(), int64_t{2});
    barrier(default_group());
    if (rank == 2) {  // it was lost between the hosts' commits of the next one
      const auto memory = folder.path("host1/" + names_in(folder.path("host1")).at(0));
      std::filesystem::rename(memory + "/step-00000002", memory + "/step-00000001");
    }
    barrier(default_group());
    expect_equal(new_run().resume(), int64_t{2});
  });
}

TEST_CASE("an in-memory checkpoint with missing data is skipped, and its step can be saved again") {
  const TempFolder folder;
  run_ranks(3, [&](int rank) {
    const auto new_run = [&] { return Run(folder, test_layout("3"), "run", fmt::format("host{}", rank)); };
    Run run = new_run();
    run.save_in_memory(2);
    barrier(default_group());
    if (rank == 1) {  // it has committed the next one, and then the job ends
      const auto memory = folder.path("host1/" + names_in(folder.path("host1")).at(0));
      std::filesystem::copy(memory + "/step-00000002", memory + "/step-00000003");
    }
    barrier(default_group());
    Run next = new_run();
    expect_equal(next.resume(), int64_t{2});
    next.save_in_memory(3);
    expect_equal(new_run().resume(), int64_t{3});
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

TEST_CASE("save_in_memory without a folder in memory, or on some ranks alone") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    const dcp::State state{.user = {{"step", int64_t{1}}}};
    expect_throws<StateError>([&] { dcp::Checkpointer(folder.path("run")).save_in_memory(1, state); },
                              "there is no memory_folder; launch_local makes job_memory_folder()");
    expect_throws<ValueError>(
        [&] {
          dcp::Checkpointer(folder.path("run"), {.memory_folder = rank == 0 ? folder.path("memory") : ""})
              .save_in_memory(1, state);
        },
        "1 of 2 ranks have no memory_folder");
  });
  CHECK(names_in(folder.path("")).empty());
}

}  // namespace tessera::testing
