// What fully_shard costs: `./bazelw run //benchmarks:fully_shard_step` (-- --json: one JSON object a measurement).
//
// The model is 16 blocks of 6 Linear(16, 16), so 16 units of 12 small parameters, where overhead is all there is.
//
//   fully_shard/host_us_per_unit   CPU time of forward and backward under fully_shard over 2 ranks of the fake backend,
//                                  which moves no data, less that of the plain model, for one unit
//   fully_shard/threads_step_ms    forward, backward and AdamW on 2 ranks that are threads
//   fully_shard/gloo_step_ms       the same on 2 processes over gloo
//   plain/step_ms                  the same of the plain model in one process
//
// Where PEER_PYTHON names a Python that has torch, fully_shard_step_peer.py measures the same there.

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/fully_shard_step_model.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "comm/rank_context.h"
#include "fully_shard/fully_shard.h"
#include "testing/run_ranks.h"

namespace tessera {
namespace {

int rounds = 15;  // --rounds N
constexpr int kSteps = 20;

using Clock = std::chrono::steady_clock;
using Results = std::map<std::string, double>;

double wall_us() {
  return std::chrono::duration<double, std::micro>(Clock::now().time_since_epoch()).count();
}

double cpu_us() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

/// Microseconds of each call by `clock`: the fastest of several rounds, since what else the machine does only adds to
/// it. The calls take turns, so that they meet the same machine.
std::vector<double> microseconds(const std::vector<std::function<void()>>& calls, double (*clock)()) {
  std::vector<double> best(calls.size(), 1e30);
  for (int round = -1; round < rounds; ++round) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const double start = clock();
      for (int step = 0; step < kSteps; ++step) {
        calls[i]();
      }
      best[i] = round < 0 ? best[i] : std::min(best[i], (clock() - start) / kSteps);
    }
  }
  return best;
}

/// Forward and backward, and the optimizer if there is one.
std::function<void()> make_step(StepModel model, std::shared_ptr<torch::optim::Optimizer> optimizer) {
  return [model, optimizer, input = at::randn({4, kStepDim})]() mutable {
    model->zero_grad();
    model(input).sum().backward();
    if (optimizer) {
      optimizer->step();
    }
  };
}

void shard(StepModel& model) {
  for (auto& block : model->blocks) {
    fully_shard(block);
  }
  fully_shard(model);
}

double step_ms(bool is_sharded) {
  StepModel model;
  if (is_sharded) {
    shard(model);
  }
  const auto optimizer = std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-3));
  return microseconds({make_step(model, optimizer)}, wall_us)[0] / 1e3;
}

double host_us_per_unit() {
  const RankContextGuard guard(RankContext::create());
  init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  StepModel plain, sharded;
  shard(sharded);
  const auto times = microseconds({make_step(plain, nullptr), make_step(sharded, nullptr)}, cpu_us);
  destroy_process_group();
  return (times[1] - times[0]) / kStepBlocks;
}

double threads_step_ms() {
  double result = 0;
  run_ranks(2, [&](int rank) {
    const double own = step_ms(true);
    if (rank == 0) {
      result = own;
    }
  });
  return result;
}

/// Measures in processes of this program; rank 0 writes the number to a file.
double gloo_step_ms() {
  const std::string path = fmt::format("{}/fully_shard_step.{}", std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp",
                                       Clock::now().time_since_epoch().count());
  const int code =
      launch_local({.nproc = 2, .environment = {{"FULLY_SHARD_STEP_RESULT", path}, {"OMP_NUM_THREADS", "1"}}});
  double result = 0;
  const bool is_read = code == 0 && std::ifstream(path) >> result;
  std::remove(path.c_str());
  TORCH_CHECK(is_read, "the ranks over gloo ended with exit code ", code, " and no result");
  return result;
}

int run_gloo_rank() {
  init_process_group({.backend = "gloo"});
  const double result = step_ms(true);
  if (get_rank() == 0) {
    std::ofstream(std::getenv("FULLY_SHARD_STEP_RESULT")) << result;
  }
  destroy_process_group();
  return 0;
}

/// The peer's lines "name value"; nothing where PEER_PYTHON is not set.
Results run_peer(const std::string& script) {
  Results results;
  const char* const python = std::getenv("PEER_PYTHON");
  if (python == nullptr) {
    return results;
  }
  FILE* const pipe = popen(fmt::format("'{}' '{}'", python, script).c_str(), "r");
  TORCH_CHECK(pipe != nullptr, "PEER_PYTHON does not start: ", python);
  std::array<char, 128> name;
  double value = 0;
  while (std::fscanf(pipe, "%127s %lf", name.data(), &value) == 2) {
    results[name.data()] = value;
  }
  TORCH_CHECK(pclose(pipe) == 0, "PEER_PYTHON failed: ", python);
  return results;
}

void print(const std::string& name, double value, const std::string& unit, const Results& peer, bool json) {
  const auto found = peer.find(name);
  const bool has_peer = found != peer.end();
  if (json) {
    fmt::print("{{\"name\": \"{}\", \"value\": {:.4g}, \"unit\": \"{}\"{}}}\n", name, value, unit,
               has_peer
                   ? fmt::format(", \"peer_value\": {:.4g}, \"ratio\": {:.4g}", found->second, value / found->second)
                   : "");
  } else {
    fmt::print("{:32} {:10.4g} {}{}\n", name, value, unit,
               has_peer ? fmt::format("   PyTorch {:.4g}, ratio {:.3f}", found->second, value / found->second) : "");
  }
  std::fflush(stdout);
}

int run(const std::vector<std::string>& arguments) {
  const bool json = std::find(arguments.begin(), arguments.end(), "--json") != arguments.end();
  const auto given = std::find(arguments.begin(), arguments.end(), "--rounds");
  if (given != arguments.end() && given + 1 != arguments.end()) {
    rounds = std::stoi(*(given + 1));
  }
  const bool host_only = std::find(arguments.begin(), arguments.end(), "--host-only") != arguments.end();
  Results peer;
  double gloo = 0;
  if (!host_only) {
    gloo = gloo_step_ms();
    peer = run_peer("benchmarks/fully_shard_step_peer.py");
  }
  print("fully_shard/host_us_per_unit", host_us_per_unit(), "us", peer, json);
  if (!host_only) {
    print("fully_shard/threads_step_ms", threads_step_ms(), "ms", peer, json);
    print("fully_shard/gloo_step_ms", gloo, "ms", peer, json);
    print("plain/step_ms", step_ms(false), "ms", peer, json);
  }
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  at::set_num_threads(1);
  try {
    return tessera::launched_as_rank() ? tessera::run_gloo_rank()
                                       : tessera::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    fmt::print(stderr, "fully_shard_step: {}\n", error.what());
    return 1;
  }
}
