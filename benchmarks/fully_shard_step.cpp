// What fully_shard costs: `./bazelw run //benchmarks:fully_shard_step` (options in measure.h).
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

#include <memory>

#include "benchmarks/fully_shard_step_model.h"
#include "benchmarks/measure.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "comm/rank_context.h"
#include "fully_shard/fully_shard.h"
#include "testing/run_ranks.h"

namespace tessera {
namespace {

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

double step_ms(bool is_sharded, int rounds) {
  StepModel model;
  if (is_sharded) {
    shard(model);
  }
  const auto optimizer = std::make_shared<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-3));
  return microseconds({make_step(model, optimizer)}, wall_us, rounds)[0] / 1e3;
}

double host_us_per_unit(int rounds) {
  const RankContextGuard guard(RankContext::create());
  init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  StepModel plain, sharded;
  shard(sharded);
  const auto times = microseconds({make_step(plain, nullptr), make_step(sharded, nullptr)}, cpu_us, rounds);
  destroy_process_group();
  return (times[1] - times[0]) / kStepBlocks;
}

double threads_step_ms(int rounds) {
  double result = 0;
  run_ranks(2, [&](int rank) {
    const double own = step_ms(true, rounds);
    if (rank == 0) {
      result = own;
    }
  });
  return result;
}

int run_gloo_rank(int rounds) {
  init_process_group({.backend = "gloo"});
  const double result = step_ms(true, rounds);
  if (get_rank() == 0) {
    write_rank_result(result);
  }
  destroy_process_group();
  return 0;
}

int run(const StepBenchmark& benchmark) {
  Results peer;
  const auto print = [&](const char* name, double value, const char* unit) {
    print_result(name, value, unit, peer, benchmark.json);
  };
  const int rounds = benchmark.rounds;
  double gloo = 0;
  if (!benchmark.host_only) {
    gloo = measure_in_processes(2);
    peer = run_peer("benchmarks/fully_shard_step_peer.py");
  }
  print("fully_shard/host_us_per_unit", host_us_per_unit(rounds), "us");
  if (!benchmark.host_only) {
    print("fully_shard/threads_step_ms", threads_step_ms(rounds), "ms");
    print("fully_shard/gloo_step_ms", gloo, "ms");
    print("plain/step_ms", step_ms(false, rounds), "ms");
  }
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  at::set_num_threads(1);
  try {
    const auto benchmark = tessera::StepBenchmark::from_arguments(argc, argv);
    return tessera::launched_as_rank() ? tessera::run_gloo_rank(benchmark.rounds) : tessera::run(benchmark);
  } catch (const std::exception& error) {
    fmt::print(stderr, "fully_shard_step: {}\n", error.what());
    return 1;
  }
}
