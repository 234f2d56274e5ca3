// What fully_shard costs: `./bazelw run //benchmarks:fully_shard_step` (options in measure.h).
//
// The model is 16 blocks of 6 Linear(16, 16), so 16 units of 12 small parameters, where overhead is all there is.
//
//   fully_shard/host_us_per_unit   CPU time of forward and backward under fully_shard over 2 ranks of the fake backend,
//                                  which moves no data, less that of the plain model, for one unit
//   fully_shard/threads_step_ms    forward, backward and AdamW on 2 ranks that are threads
//   fully_shard/shm_step_ms        the same on 2 processes over shm
//   fully_shard/gloo_step_ms       the same on 2 processes over gloo
//   plain/step_ms                  the same of the plain model in one process
//
// Where PEER_PYTHON names a Python that has torch, fully_shard_step_peer.py measures the same there.

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <torch/optim/adamw.h>

#include <memory>

#include "benchmarks/fully_shard_step_model.h"
#include "benchmarks/measure.h"
#include "comm/process_group.h"
#include "comm/rank_context.h"
#include "fully_shard/fully_shard.h"

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

void run(const StepBenchmark& benchmark) {
  Results peer;
  const auto print = [&](const char* name, double value, const char* unit) {
    print_result(name, value, unit, peer, benchmark.json);
  };
  const int rounds = benchmark.rounds;
  double shm = 0, gloo = 0;
  if (!benchmark.host_only) {
    shm = measure_in_processes(2, "shm");
    gloo = measure_in_processes(2, "gloo");
    peer = run_peer("benchmarks/fully_shard_step_peer.py");
  }
  print("fully_shard/host_us_per_unit", host_us_per_unit(rounds), "us");
  if (!benchmark.host_only) {
    print("fully_shard/threads_step_ms", measure_in_threads(2, [&] { return step_ms(true, rounds); }), "ms");
    print("fully_shard/shm_step_ms", shm, "ms");
    print("fully_shard/gloo_step_ms", gloo, "ms");
    print("plain/step_ms", step_ms(false, rounds), "ms");
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::benchmark_main("fully_shard_step", argc, argv, tessera::run,
                                 [](int rounds) { return tessera::step_ms(true, rounds); });
}
