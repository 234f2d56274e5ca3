// A training run whose ranks kill themselves, for chaos_test.cpp.
//
//   training_run FOLDER BACKEND STEPS KILLS SEED memory|disk
//
// Start k < KILLS of the ranks ends by SIGKILL at a moment that SEED and k choose, unless training is over before. The
// last checkpoint is FOLDER/step-<STEPS>; FOLDER/log has a line for each event (chaos_log.h). With "memory", steps
// without one there have an in-memory checkpoint. With SEED 0, a rank is killed in each phase by turns. Ranks stay, if
// the launcher keeps survivors.

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <signal.h>
#include <torch/nn/functional/loss.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "checkpoint/checkpointer.h"
#include "comm/collectives.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "comm/rank_environment.h"
#include "comm/run_elastic.h"
#include "device_mesh/device_mesh.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/random/random.h"
#include "fully_shard/fully_shard.h"
#include "nn/dropout.h"
#include "nn/linear.h"
#include "optim/fused_optimizers.h"
#include "tests/chaos/chaos_log.h"

namespace tessera::testing {
namespace {

struct RunOptions {
  std::string folder;
  std::string backend;
  int64_t steps = 0;
  int kills = 0;
  uint64_t seed = 0;
  bool in_memory = false;
};

/// When ranks of one start are killed.
struct KillPlan {
  int rank = 0;  // or both this one and all others
  bool all_ranks = false;
  Phase phase = Phase::Start;
  int64_t steps = 0;  // complete ones of this start before
  std::chrono::microseconds delay{0};
};

constexpr std::chrono::microseconds longest_delay(Phase phase) {
  switch (phase) {
    case Phase::Start:
      return std::chrono::milliseconds(150);
    case Phase::Resume:
      return std::chrono::milliseconds(20);
    case Phase::Checkpoint:
      return std::chrono::milliseconds(15);
    case Phase::InMemory:
      return std::chrono::milliseconds(8);
    default:
      return std::chrono::milliseconds(1);
  }
}

KillPlan make_plan(const RunOptions& options, int restart, int ranks) {
  std::mt19937_64 random(options.seed * 1'000'003 + static_cast<uint64_t>(restart));
  const auto below = [&](uint64_t limit) { return random() % limit; };
  KillPlan plan;
  plan.rank = static_cast<int>(below(static_cast<uint64_t>(ranks)));
  plan.all_ranks = below(8) == 0;
  const int phases = options.in_memory ? kPhases : kPhasesOnDisk;
  plan.phase = static_cast<Phase>(below(static_cast<uint64_t>(phases)));
  plan.steps = static_cast<int64_t>(below(6));
  plan.delay = std::chrono::microseconds(below(static_cast<uint64_t>(longest_delay(plan.phase).count()) + 1));
  if (options.seed == 0) {
    plan = {.rank = restart % ranks, .phase = static_cast<Phase>(restart % phases)};
  }
  return plan;
}

class Killer {
 public:
  Killer(const RunOptions& options, ChaosLog& log) : log_(log) {
    const auto ranks = rank_environment();
    rank_ = ranks.rank;
    if (restart_count() < options.kills) {
      plan_ = make_plan(options, restart_count(), ranks.world_size);
    }
  }
  /// From here on the process may end.
  void enter(Phase phase, int64_t steps_of_start = 0) {
    const bool is_mine = plan_ && (plan_->all_ranks || plan_->rank == rank_) && plan_->phase == phase &&
                         (phase <= Phase::Resume || plan_->steps <= steps_of_start);
    if (!is_mine) {
      return;
    }
    std::thread([this, plan = *plan_, start = restart_count()] {
      std::this_thread::sleep_for(plan.delay);
      if (restart_count() != start) {
        return;  // another rank has ended that one
      }
      log_.write(fmt::format("kill {} {} {} {}", restart_count(), rank_, static_cast<int>(plan.phase), now_ns()));
      kill(getpid(), SIGKILL);
    }).detach();
    plan_.reset();
  }

 private:
  ChaosLog& log_;
  int rank_ = 0;
  std::optional<KillPlan> plan_;
};

struct NetImpl : torch::nn::Module {
  NetImpl() {
    up = register_module("up", nn::Linear(8, 65));
    middle = register_module("middle", nn::Linear(65, 65));
    dropout = register_module("dropout", nn::Dropout(0.1));
    down = register_module("down", nn::Linear(65, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return down(dropout(middle(up(x).tanh()).tanh())); }

  nn::Linear up{nullptr}, middle{nullptr}, down{nullptr};
  nn::Dropout dropout{nullptr};
};
TESSERA_MODULE(Net);

/// A rank's part of a step's batch, at the data's position.
at::Tensor make_batch(int64_t position) {
  return at::randn({4, 11}, new_generator(at::kCPU, static_cast<uint64_t>(position + get_rank())));
}

double mean_over_ranks(const at::Tensor& loss) {
  const at::Tensor mean = loss.detach().to(at::kDouble);
  all_reduce(mean, ReduceOp::Avg, default_group());
  return mean.item<double>();
}

/// Saves every other step, and the last one.
class Saver {
 public:
  Saver(dcp::Checkpointer& checkpointer, ChaosLog& log, int64_t steps)
      : checkpointer_(checkpointer), log_(log), steps_(steps) {}
  bool is_due(int64_t done) const { return done % 2 == 0 || done == steps_; }
  void save(int64_t done, const dcp::State& state) {
    if (get_rank() == 0) {
      log_.write(fmt::format("saving {}", done));
    }
    if (restart_count() % 2 == 0) {
      checkpointer_.save(done, state);
      in_flight_ = done;
      note_saved();
    } else {
      checkpointer_.async_save(done, state);
      note_saved();
      in_flight_ = done;
    }
  }
  void finish() {
    checkpointer_.wait();
    note_saved();
  }

 private:
  void note_saved() {
    if (in_flight_ > 0 && get_rank() == 0) {
      log_.write(fmt::format("saved {}", in_flight_));
    }
    in_flight_ = 0;
  }

  dcp::Checkpointer& checkpointer_;
  ChaosLog& log_;
  int64_t steps_;
  int64_t in_flight_ = 0;
};

void train(const RunOptions& options, ChaosLog& log, Killer& killer) {
  killer.enter(Phase::Start);
  init_process_group({.backend = options.backend, .timeout = std::chrono::seconds(30)});
  const auto mesh = init_device_mesh(at::kCPU, {get_world_size()}, {"dp"});
  torch::manual_seed(0);
  Net net;
  fully_shard(net->middle, {.mesh = mesh});
  fully_shard(net, {.mesh = mesh});
  optim::FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));

  dcp::Checkpointer checkpointer(options.folder,
                                 {.keep_last = 3, .memory_folder = options.in_memory ? job_memory_folder() : ""});
  dcp::StateDict user = {{"position", int64_t{0}}};
  killer.enter(Phase::Resume);
  const int64_t first = checkpointer.resume_or_start(net, optimizer, user);
  if (get_rank() == 0) {
    log.write(fmt::format("resumed {}", first));
  }
  Saver saver(checkpointer, log, options.steps);
  for (int64_t step = first; step < options.steps; ++step) {
    auto& position = std::get<int64_t>(user.at("position"));
    const at::Tensor batch = make_batch(position);
    position += get_world_size();
    optimizer.zero_grad();
    killer.enter(Phase::Forward, step - first);
    const at::Tensor loss = torch::nn::functional::mse_loss(net(batch.narrow(1, 0, 8)), batch.narrow(1, 8, 3));
    killer.enter(Phase::Backward, step - first);
    loss.backward();
    killer.enter(Phase::Optimizer, step - first);
    clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
    const double mean = mean_over_ranks(loss);
    if (get_rank() == 0) {
      log.write(fmt::format("step {} {:a} {}", step, mean, now_ns()));
    }
    const int64_t done = step + 1;
    const auto state = dcp::training_state(net, optimizer, user);
    if (saver.is_due(done)) {
      killer.enter(Phase::Checkpoint, step - first);
      saver.save(done, state);
    } else if (options.in_memory) {
      killer.enter(Phase::InMemory, step - first);
      checkpointer.save_in_memory(done, state);
      if (get_rank() == 0) {
        log.write(fmt::format("in_memory {}", done));
      }
    }
  }
  saver.finish();
  destroy_process_group();
}

}  // namespace
}  // namespace tessera::testing

int main(int argc, char** argv) {
  using namespace tessera;
  if (argc != 7) {
    return kUserErrorExitCode;
  }
  at::set_num_threads(1);
  const testing::RunOptions options{.folder = argv[1],
                                    .backend = argv[2],
                                    .steps = std::atoll(argv[3]),
                                    .kills = std::atoi(argv[4]),
                                    .seed = static_cast<uint64_t>(std::atoll(argv[5])),
                                    .in_memory = argv[6] == std::string("memory")};
  return report_errors([&] {
    // They outlive main, which a thread that is about to kill may outlive.
    static auto& log = *new testing::ChaosLog(options.folder + "/log");
    run_elastic([&] { testing::train(options, log, *new testing::Killer(options, log)); });
  });
}
