// A run's checkpoints: in the background, the last few kept, planned once.

#include <ATen/ops/rand.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <map>
#include <thread>

#include "checkpoint/checkpointer.h"
#include "checkpoint/format/checkpoint_error.h"
#include "comm/collectives.h"
#include "comm/context/comm_observer.h"
#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "dtensor/random/random.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "tests/checkpoint/layouts.h"
#include "tests/reference/captured_warnings.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// "w", cut over the ranks, and "b", copied: all elements `value`.
struct Filled {
  explicit Filled(const DeviceMesh& mesh)
      : w(distribute_tensor(at::zeros({31, 7}), mesh, {Shard(0)})), b(at::zeros({40})) {}
  void fill(double value) {
    w.fill_(value);
    b.fill_(value);
  }
  dcp::State state() const { return {.model = {{"w", w}, {"b", b}}}; }
  void expect_all(double value) const {
    expect_bit_equal(full_tensor(w), at::full({31, 7}, value));
    expect_bit_equal(b, at::full({40}, value));
  }

  at::Tensor w, b;
};

/// The first rank warned once, and said all of `words`; the others did not.
void expect_one_warning_of_rank0(const CapturedWarnings& warnings, int rank, const std::vector<std::string>& words) {
  expect_equal(warnings.texts().size(), rank == 0 ? size_t{1} : size_t{0});
  for (const auto& text : warnings.texts()) {
    for (const auto& word : words) {
      TESSERA_EXPECT(text.find(word) != std::string::npos);
    }
  }
}

}  // namespace

TEST_CASE("the last k checkpoints are kept, and latest() is the last that is whole") {
  const TempFolder folder;
  run_ranks(3, [&](int rank) {
    Filled filled(init_device_mesh(at::kCPU, {3}, {"dp"}));
    dcp::Checkpointer checkpointer(folder.path("run"), {.keep_last = 2});
    TESSERA_EXPECT(!checkpointer.latest());
    for (const int64_t step : {1, 2, 3, 100000000, 7}) {
      filled.fill(static_cast<double>(step));
      checkpointer.save(step, filled.state());
    }
    expect_equal(*checkpointer.latest(), folder.path("run/step-100000000"));
    barrier(default_group());
    if (rank == 0) {
      expect_equal(names_in(folder.path("run")), std::vector<std::string>{"step-00000007", "step-100000000"});
      std::filesystem::remove(folder.path("run/step-100000000/tessera.json"));
      std::filesystem::create_directories(folder.path("run/step-00000009.incomplete-1"));
    }
    barrier(default_group());
    expect_equal(*dcp::latest(folder.path("run")), folder.path("run/step-00000007"));
    dcp::State loaded = filled.state();
    filled.fill(0);
    dcp::load(*dcp::latest(folder.path("run")), loaded);
    filled.expect_all(7);
    checkpointer.save(8, filled.state());
    expect_throws<ValueError>([&] { checkpointer.save(-1, filled.state()); }, "step -1; steps count from 0");
  });
  CHECK(names_in(folder.path("run")) == std::vector<std::string>{"step-00000007", "step-00000008", "step-100000000"});
}

TEST_CASE("what another save in the folder has begun stays; what a killed one of this run left goes") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    Filled filled(init_device_mesh(at::kCPU, {2}, {"dp"}));
    if (rank == 0) {
      for (const auto* name : {"step-1.safetensors.incomplete-1", "step-.incomplete-1", "step-1a.incomplete-1",
                               "step-00000001.incomplete-1", "step-100000000.incomplete-removed"}) {
        std::filesystem::create_directories(folder.path("run") + "/" + name);
      }
    }
    barrier(default_group());
    dcp::Checkpointer(folder.path("run")).save(2, filled.state());
  });
  CHECK(names_in(folder.path("run")) == std::vector<std::string>{"step-.incomplete-1", "step-00000002",
                                                                 "step-1.safetensors.incomplete-1",
                                                                 "step-1a.incomplete-1"});
}

TEST_CASE("a folder that cannot be listed is an error on every rank, and not one without checkpoints") {
  const TempFolder folder;
  write_file(folder.path("run"), "x");
  run_ranks(2, [&](int) {
    expect_throws<CheckpointError>([&] { dcp::latest(folder.path("run")); },
                                   folder.path("run") + ": its checkpoints cannot be listed: Not a directory");
    TESSERA_EXPECT(!dcp::latest(folder.path("not yet")));
  });
}

TEST_CASE("what was just saved is kept, also where its step is lower than the others'") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    Filled filled(init_device_mesh(at::kCPU, {2}, {"dp"}));
    const auto expect_kept = [&](const std::vector<std::string>& names) {
      if (rank == 0) {  // which has removed the others
        expect_equal(names_in(folder.path("run")), names);
      }
      barrier(default_group());
    };
    dcp::Checkpointer three(folder.path("run"), {.keep_last = 3}), one(folder.path("run"), {.keep_last = 1});
    for (const int64_t step : {10, 20, 30}) {
      three.save(step, filled.state());
    }
    three.save(5, filled.state());
    expect_kept({"step-00000005", "step-00000020", "step-00000030"});
    three.async_save(7, filled.state());
    three.wait();
    expect_kept({"step-00000007", "step-00000020", "step-00000030"});
    filled.fill(4);
    one.save(4, filled.state());
    expect_kept({"step-00000004"});
    dcp::State loaded = filled.state();
    filled.fill(0);
    dcp::load(*one.latest(), loaded);
    filled.expect_all(4);
  });
}

TEST_CASE("a run that went back sets later checkpoints aside at its first save, and they count no more") {
  const TempFolder folder;
  const auto run = [&](bool is_async) {
    const auto path = folder.path(is_async ? "async" : "sync");
    run_ranks(2, [&](int rank) {
      Filled filled(init_device_mesh(at::kCPU, {2}, {"dp"}));
      dcp::Checkpointer first(path, {.keep_last = 3}), checkpointer(path, {.keep_last = 3});
      const auto save = [&](dcp::Checkpointer& by, int64_t step, double value) {
        filled.fill(value);
        is_async ? by.async_save(step, filled.state()) : by.save(step, filled.state());
        by.wait();
      };
      const auto expect_names = [&](const std::vector<std::string>& names) {
        barrier(default_group());
        if (rank == 0) {
          expect_equal(names_in(path), names);
        }
        barrier(default_group());
      };
      for (const int64_t step : {100, 200, 300}) {
        save(first, step, 1);
      }
      expect_throws<CheckpointError>([&] { save(checkpointer, 200, 2); },
                                     "step-00000200: there is something already, the checkpoint of this step; if "
                                     "training went back to an earlier one, call resume_at()");
      checkpointer.resume_at(100);
      expect_equal(*checkpointer.latest(), checkpointer.checkpoint_path(100));
      expect_names({"step-00000100", "step-00000200", "step-00000300"});  // until the first save
      save(checkpointer, 150, 2);
      expect_equal(*checkpointer.latest(), checkpointer.checkpoint_path(150));
      save(checkpointer, 200, 2);
      expect_names(
          {"step-00000100", "step-00000150", "step-00000200", "step-00000200.aside-0", "step-00000300.aside-0"});
      save(checkpointer, 300, 2);
      expect_equal(*checkpointer.latest(), checkpointer.checkpoint_path(300));
      checkpointer.resume_at(150);
      save(checkpointer, 160, 3);
      expect_names({"step-00000150", "step-00000160", "step-00000200.aside-0", "step-00000200.aside-1",
                    "step-00000300.aside-0", "step-00000300.aside-1"});
      for (const auto& [name, value] : std::map<std::string, double>{
               {"step-00000160", 3}, {"step-00000200.aside-0", 1}, {"step-00000200.aside-1", 2}}) {
        dcp::State loaded = filled.state();
        filled.fill(0);
        dcp::load(path + "/" + name, loaded);
        filled.expect_all(value);
      }
      expect_throws<ValueError>([&] { checkpointer.resume_at(100 + rank); },
                                "rank 0 goes on from step 100, rank 1 from");
      expect_throws<ValueError>([&] { checkpointer.resume_at(-1); }, "step -1; steps count from 0");
    });
  };
  run(/*is_async=*/false);
  run(/*is_async=*/true);
}

TEST_CASE("a run that went back is told of resume_at(), once, and of what its first save after it sets aside") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const TempFolder folder;
  run_ranks(world_size, [&](int rank) {
    const Filled filled(init_device_mesh(at::kCPU, {world_size}, {"dp"}));
    {
      const CapturedWarnings warnings;
      dcp::Checkpointer first(folder.path("run"));
      for (const int64_t step : {100, 99999999, 100000000}) {
        first.save(step, filled.state());
      }
      expect_equal(warnings.texts(), std::vector<std::string>{});
    }
    dcp::Checkpointer checkpointer(folder.path("run"));
    {
      const CapturedWarnings warnings;
      checkpointer.save(150, filled.state());
      checkpointer.save(250, filled.state());
      expect_one_warning_of_rank0(
          warnings, rank,
          {"Checkpointer: " + checkpointer.checkpoint_path(150) + " is saved while there is a later one, " +
               checkpointer.checkpoint_path(100000000),
           "if training went back to an earlier step, call resume_at() with that step before the first save"});
      expect_equal(checkpointer.latest().value(), checkpointer.checkpoint_path(100000000));
    }
    checkpointer.resume_at(150);
    const CapturedWarnings warnings;
    checkpointer.save(200, filled.state());
    checkpointer.save(300, filled.state());
    expect_one_warning_of_rank0(
        warnings, rank,
        {"Checkpointer: training went on from step 150; later checkpoints are set aside, as ",
         checkpointer.checkpoint_path(100000000) + ".aside-0, " + checkpointer.checkpoint_path(99999999) +
             ".aside-0, " + checkpointer.checkpoint_path(250) + ".aside-0"});
  });
}

TEST_CASE("latest_valid() takes the checkpoint before those that are damaged, which the next save sets aside") {
  const TempFolder folder;
  const auto damage = [&](int64_t step, const std::string& what) {
    const auto path = folder.path(fmt::format("run/step-{:08}", step));
    const auto file = path + "/model-00001-of-00001.safetensors";
    if (what == "a flipped bit") {
      auto content = read_file(file);
      content.back() = static_cast<char>(content.back() ^ 1);
      write_file(file, content);
    } else if (what == "a missing file") {
      std::filesystem::remove(file);
    } else {
      write_file(path + "/tessera.json", "{");
    }
  };
  run_ranks(2, [&](int rank) {
    Filled filled(init_device_mesh(at::kCPU, {2}, {"dp"}));
    const auto on_rank0 = [&](const auto& step) {
      barrier(default_group());
      if (rank == 0) {
        step();
      }
      barrier(default_group());
    };
    dcp::Checkpointer checkpointer(folder.path("run"));
    TESSERA_EXPECT(!checkpointer.latest_valid());
    for (const int64_t step : {1, 2, 3, 4}) {
      filled.fill(static_cast<double>(step));
      checkpointer.save(step, filled.state());
    }
    expect_equal(*checkpointer.latest_valid(), checkpointer.checkpoint_path(4));
    on_rank0([&] {
      damage(4, "a flipped bit");
      damage(3, "a missing file");
      damage(2, "half a manifest");
    });
    expect_equal(*checkpointer.latest(), checkpointer.checkpoint_path(4));
    {
      const CapturedWarnings warnings;
      expect_equal(*checkpointer.latest_valid(), checkpointer.checkpoint_path(1));
      expect_equal(warnings.texts().size(), rank == 0 ? size_t{3} : size_t{0});
      int64_t step = 4;
      for (const auto& text : warnings.texts()) {
        const auto path = checkpointer.checkpoint_path(step--);
        const auto begin = "Checkpointer: " + path + " is damaged, and the one before is looked at: ";
        expect_equal(text.substr(0, begin.size() + path.size()), begin + path);  // the fault begins with its file
      }
    }
    checkpointer.save(2, filled.state());
    on_rank0([&] {
      expect_equal(names_in(folder.path("run")),
                   std::vector<std::string>{"step-00000001", "step-00000002", "step-00000002.aside-0",
                                            "step-00000003.aside-0", "step-00000004.aside-0"});
      damage(1, "a flipped bit");
      damage(2, "a missing file");
    });
    expect_throws<CheckpointError>(
        [&] { checkpointer.latest_valid(); },
        folder.path("run") + ": all of its checkpoints are damaged; the last one: " + checkpointer.checkpoint_path(2));
  });
}

TEST_CASE("resume_or_start() brings back model, optimizer, values and random generators of the last whole checkpoint") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    const auto draw = [] { return at::rand({3}, dtensor_generator(at::kCPU)); };
    dcp::Checkpointer checkpointer(folder.path("run"));
    TestTrainer trainer(test_layout("2"), /*seed=*/1);
    const dcp::StateDict start = clones(dcp::get_model_state_dict(trainer.model, kFull));
    dcp::StateDict user = {{"position", int64_t{7}}, {"losses", at::Tensor()}};
    expect_equal(checkpointer.resume_or_start(trainer.model, trainer.optimizer, user), int64_t{0});
    expect_equal(std::get<int64_t>(user.at("position")), int64_t{7});
    for (const auto& [name, value] : dcp::get_model_state_dict(trainer.model, kFull)) {
      expect_bit_equal(std::get<at::Tensor>(value), std::get<at::Tensor>(start.at(name)));
    }
    manual_seed(5);
    for (const int64_t step : {1, 2}) {
      trainer.train(step);
      draw();
      checkpointer.save(step, dcp::training_state(trainer.model, trainer.optimizer,
                                                  {{"position", 10 * step}, {"losses", at::full({2}, step)}}));
    }
    const double next_loss = trainer.train(3), last_loss = trainer.train(4);
    const at::Tensor next_draw = draw();

    const auto expect_resumed = [&](int64_t step) {
      TestTrainer other(test_layout("2"), /*seed=*/2);
      manual_seed(6);
      dcp::Checkpointer again(folder.path("run"));
      expect_equal(again.resume_or_start(other.model, other.optimizer, user), step);
      expect_equal(std::get<int64_t>(user.at("position")), 10 * step);
      expect_bit_equal(std::get<at::Tensor>(user.at("losses")), at::full({2}, step));
      for (int64_t made_again = step; made_again < 2; ++made_again) {
        other.train(made_again + 1);
        draw();
      }
      expect_equal(other.train(3), next_loss);
      expect_equal(other.train(4), last_loss);
      expect_bit_equal(draw(), next_draw);
    };
    expect_resumed(2);
    barrier(default_group());
    if (rank == 0) {
      write_file(checkpointer.checkpoint_path(2) + "/tessera.json", "{");
    }
    barrier(default_group());
    const CapturedWarnings warnings;
    expect_resumed(1);
  });
}

TEST_CASE("async_save writes what the tensors were, while the ranks go on") {
  const TempFolder folder;
  run_ranks(3, [&](int) {
    Filled filled(init_device_mesh(at::kCPU, {3}, {"dp"}));
    dcp::Checkpointer checkpointer(folder.path("run"));
    for (int64_t step = 1; step <= 4; ++step) {
      filled.fill(static_cast<double>(step));
      checkpointer.async_save(step, filled.state());
      filled.fill(-1);
      const auto sum = at::ones({10});
      for (int i = 0; i < 20; ++i) {
        all_reduce(sum, ReduceOp::Sum, default_group());
      }
    }
    checkpointer.wait();
    for (int64_t step = 1; step <= 4; ++step) {
      dcp::State loaded = filled.state();
      dcp::load(checkpointer.checkpoint_path(step), loaded);
      filled.expect_all(static_cast<double>(step));
    }
  });
}

TEST_CASE("who watches a rank's collectives sees none of a save in the background") {
  struct Watcher : CommObserver {
    void on_collective(Collective, int64_t) override { ++(std::this_thread::get_id() == own ? calls : of_others); }
    const std::thread::id own = std::this_thread::get_id();
    std::atomic<int> calls = 0, of_others = 0;
  };
  const TempFolder folder;
  run_ranks(2, [&](int) {
    const Filled filled(init_device_mesh(at::kCPU, {2}, {"dp"}));
    dcp::Checkpointer checkpointer(folder.path("run"));
    Watcher watcher;
    const CommObserverScope scope(watcher);
    const int64_t before = comm_stats().calls();
    checkpointer.async_save(1, filled.state());
    checkpointer.wait();
    TESSERA_EXPECT(watcher.calls > 0 && comm_stats().calls() > before + watcher.calls);
    expect_equal(watcher.of_others.load(), 0);
  });
}

TEST_CASE("an error in the background is raised by the next call, once, on every rank") {
  const TempFolder folder;
  run_ranks(2, [&](int) {
    Filled filled(init_device_mesh(at::kCPU, {2}, {"dp"}));
    dcp::Checkpointer checkpointer(folder.path("run"));
    checkpointer.save(1, filled.state());
    checkpointer.async_save(1, filled.state());
    expect_throws<CheckpointError>([&] { checkpointer.wait(); }, "step-00000001: there is something already");
    checkpointer.wait();
    checkpointer.async_save(1, filled.state());
    expect_throws<CheckpointError>([&] { checkpointer.async_save(2, filled.state()); }, "there is something already");
    checkpointer.async_save(3, filled.state());
    checkpointer.wait();
    expect_equal(*checkpointer.latest(), folder.path("run/step-00000003"));
  });
}

TEST_CASE("a reporter that throws what is no std::exception is an error too, and at the end a warning") {
  const TempFolder folder;
  run_ranks(2, [&](int) {
    Filled filled(init_device_mesh(at::kCPU, {2}, {"dp"}));
    const dcp::CheckpointerOptions throws{.progress = [](const dcp::Progress&) { throw 42; }};
    dcp::Checkpointer checkpointer(folder.path("run"), throws);
    expect_throws<Error>([&] { checkpointer.save(1, filled.state()); }, "no std::exception");
    checkpointer.async_save(2, filled.state());
  });
}

TEST_CASE("a rank that cannot copy its bytes is an error of all, and nothing is saved") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    Filled filled(init_device_mesh(at::kCPU, {2}, {"dp"}));
    dcp::Checkpointer checkpointer(folder.path("run"));
    auto state = filled.state();
    if (rank == 1) {
      const auto freed = at::ones({4});
      freed.storage().set_nbytes(0);
      state.model["freed"] = freed;
    }
    expect_throws<Error>([&] { checkpointer.async_save(1, state); }, "(met by rank 1)");
    checkpointer.async_save(2, filled.state());
    checkpointer.wait();
  });
  CHECK(names_in(folder.path("run")) == std::vector<std::string>{"step-00000002"});
}

TEST_CASE("a second save of the same tensors is not planned again; one of others is") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    Filled filled(mesh);
    dcp::Checkpointer checkpointer(folder.path("run"));
    const auto bytes_sent = [&](int64_t step, const dcp::State& state) {
      reset_comm_stats();
      checkpointer.save(step, state);
      return comm_stats()[Collective::AllGather].bytes_sent;
    };
    const auto first = bytes_sent(1, filled.state()), second = bytes_sent(2, filled.state());
    TESSERA_EXPECT(second < first);
    auto changed = filled.state();
    if (rank == 1) {
      changed.model["of rank 1"] = at::ones({3});
    }
    checkpointer.save(3, changed);
    dcp::State loaded{.model = {{"of rank 1", at::zeros({3})}}};
    dcp::load(checkpointer.checkpoint_path(3), loaded, {.strict = false});
    expect_bit_equal(std::get<at::Tensor>(loaded.model["of rank 1"]), at::ones({3}));
  });
}

TEST_CASE("async_save says at once that ranks disagree, and saves nothing") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    Filled filled(init_device_mesh(at::kCPU, {2}, {"dp"}));
    dcp::Checkpointer checkpointer(folder.path("run"));
    const auto refused = [&](int64_t step, dcp::StateDict user, const std::string& message) {
      auto state = filled.state();
      state.user = std::move(user);
      expect_throws<ValueError>([&] { checkpointer.async_save(step, state); }, message);
      expect_throws<ValueError>([&] { checkpointer.save(step, state); }, message);
    };
    refused(1, {{"loss", 0.5 + rank}}, "save: 'user.loss' differs between ranks");
    refused(1, {{"name", std::string("\xff")}}, "must be UTF-8");
    refused(1 + rank, {}, "the ranks differ in the path (or step)");
    refused(rank == 0 ? 1 : -1, {}, "the ranks differ in the path (or step)");
    refused(-1, {}, "step -1; steps count from 0");
    checkpointer.wait();
    barrier(default_group());
    TESSERA_EXPECT(!std::filesystem::exists(folder.path("run")));
    checkpointer.async_save(1, filled.state());
    checkpointer.wait();
  });
}

TEST_CASE("latest() waits for the save in flight, which may remove what was the latest before") {
  const TempFolder folder;
  run_ranks(2, [&](int) {
    Filled filled(init_device_mesh(at::kCPU, {2}, {"dp"}));
    const auto slow = [](const dcp::Progress&) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
    dcp::Checkpointer checkpointer(folder.path("run"), {.keep_last = 1, .progress = slow});
    checkpointer.save(1, filled.state());
    filled.fill(2);
    checkpointer.async_save(2, filled.state());
    const auto path = checkpointer.latest();
    expect_equal(path.value(), folder.path("run/step-00000002"));
    dcp::State loaded = filled.state();
    filled.fill(0);
    dcp::load(*path, loaded);
    filled.expect_all(2);
    checkpointer.async_save(2, filled.state());
    expect_throws<CheckpointError>([&] { checkpointer.latest(); }, "there is something already");
    expect_equal(checkpointer.latest().value(), *path);
  });
}

TEST_CASE("leftovers of other steps make room before a save, also one that fails") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    Filled filled(init_device_mesh(at::kCPU, {2}, {"dp"}));
    dcp::Checkpointer checkpointer(folder.path("run"));
    checkpointer.save(1, filled.state());
    if (rank == 0) {
      std::filesystem::create_directories(folder.path("run/step-00000007.incomplete-12345678"));
      std::filesystem::create_directories(folder.path("run/step-00000008.incomplete-removed"));
    }
    barrier(default_group());
    expect_throws<CheckpointError>([&] { checkpointer.save(1, filled.state()); }, "there is something already");
  });
  CHECK(names_in(folder.path("run")) == std::vector<std::string>{"step-00000001"});
}

TEST_CASE("a save in flight stays whole beside others of the same run in its folder") {
  const TempFolder folder;
  run_ranks(2, [&](int) {
    Filled filled(init_device_mesh(at::kCPU, {2}, {"dp"}));
    std::atomic<bool> may_end = false;
    const auto wait_for_end = [&](const dcp::Progress&) {
      while (!may_end) {
        std::this_thread::yield();
      }
    };
    dcp::Checkpointer first(folder.path("run"), {.progress = wait_for_end}), second(folder.path("run"));
    const struct Ending {
      ~Ending() { flag = true; }
      std::atomic<bool>& flag;
    } ending{may_end};  // also where something throws
    filled.fill(1);
    first.async_save(1, filled.state());
    filled.fill(2);
    second.save(2, filled.state());
    dcp::save(second.checkpoint_path(3), filled.state());
    may_end = true;
    first.wait();
    for (const int64_t step : {1, 2, 3}) {
      dcp::State loaded = filled.state();
      dcp::load(first.checkpoint_path(step), loaded);
      filled.expect_all(step == 1 ? 1 : 2);
    }
  });
  CHECK(names_in(folder.path("run")).size() == 3);
}

}  // namespace tessera::testing
