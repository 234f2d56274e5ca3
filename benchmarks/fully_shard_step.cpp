// Cost of a training step under fully_shard: `./bazelw run //benchmarks:fully_shard_step -- --size 256 --ranks 4`.
//
// The models are in train_model.h; a step is forward, backward and fused AdamW.
//
//   fully_shard/host_us_per_unit   CPU time of forward and backward under fully_shard over 2 ranks of the fake backend,
//                                  which moves no data, minus that of the plain model, per unit; for tiny only
//   fully_shard/threads_step_ms    a step on ranks that are threads
//   fully_shard/shm_step_ms        on processes over shm
//   fully_shard/gloo_step_ms       on processes over gloo
//   plain/step_ms                  of the plain model in one process, alternating with shm_step_ms; other ranks wait
//   plain/forward_backward_ms      likewise, without AdamW
//   fully_shard/shm_over_plain     shm_step_ms / plain step_ms
//   fully_shard/shm_over_ideal     shm_step_ms / (plain forward and backward + the rest of the plain step / ranks)
//   plain/side_by_side_step_ms     like plain/step_ms, while the other ranks do the same, and all meet after each step:
//                                  they share caches and memory, and wait for the slowest
//   floor/communication_ms         the step's collectives as plain copies and sums of data in shared memory
//                                  (shm_floor.h), without concurrent computation: blocks are gathered twice, other
//                                  parameters once, and all gradients are reduced
//   floor/step_ms                  that plus the ideal step of processes that run side by side: no step that ends with
//                                  the same parameters on all ranks can be faster than its slowest rank
//   floor/over_plain, /over_ideal  floor/step_ms instead of shm_step_ms
//   fully_shard/shm_over_floor     shm_step_ms / floor/step_ms: the engine, and ranks that wait more than once per step
//
// If PEER_PYTHON names a Python with torch, fully_shard_step_peer.py measures the same there, over gloo, which is also
// the peer of shm_step_ms.

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "benchmarks/measure.h"
#include "benchmarks/shm_floor.h"
#include "benchmarks/train_model.h"
#include "comm/collectives.h"
#include "comm/context/rank_context.h"
#include "comm/process_group.h"

namespace tessera {
namespace {

struct StepOptions {
  std::string size = "tiny";
  int ranks = 2;
  bool host_only = false;
};

/// Returns the milliseconds of a step of the sharded model. With `beside_plain`, also measures the plain model in
/// alternation: on rank 0 alone, while the others wait for the next sharded step, and on all ranks side by side, which
/// meet after each step.
Results measure_step(const std::string& size, bool beside_plain, int rounds) {
  const TrainModel sharded = make_train_model(size);
  shard(sharded);
  std::vector<std::function<void()>> calls{make_step(sharded, Optimizer::AdamW)};
  if (!beside_plain) {
    return {{"sharded", microseconds(calls, wall_us, rounds, sharded.steps)[0] / 1e3}};
  }
  const TrainModel plain = make_train_model(size);
  const auto step = make_step(plain, Optimizer::AdamW), forward_backward = make_step(plain, Optimizer::None);
  const auto together = [&] { barrier(default_group()); };
  const auto alone = [&](const std::function<void()>& call) { return get_rank() == 0 ? call : [] {}; };
  const auto and_meet = [&](const std::function<void()>& call) {
    return [call, together] {
      call();
      together();
    };
  };
  calls.insert(calls.end(),
               {alone(step), alone(forward_backward), together, and_meet(step), and_meet(forward_backward)});
  const auto times = microseconds(calls, wall_us, rounds, sharded.steps);
  return {{"sharded", times[0] / 1e3},
          {"plain", times[1] / 1e3},
          {"forward_backward", times[2] / 1e3},
          {"side_by_side", times[4] / 1e3},
          {"side_by_side_forward_backward", times[5] / 1e3}};
}

/// Returns the time of a step without communication, in which each rank does only its part of the optimizer's work.
double ideal(double step, double forward_backward, int ranks) {
  return forward_backward + (step - forward_backward) / ranks;
}

double parameter_bytes(const torch::nn::Module& module) {
  double bytes = 0;
  for (const auto& param : module.parameters()) {
    bytes += static_cast<double>(param.nbytes());
  }
  return bytes;
}

double communication_floor_ms(const std::string& size, int ranks, int rounds) {
  const TrainModel model = make_train_model(size);
  const double block = parameter_bytes(*model.blocks[0]), all = parameter_bytes(*model.module);
  const auto blocks = static_cast<double>(model.blocks.size());
  const auto block_bytes = static_cast<size_t>(block);
  const double gather = measure_shm_floor(ranks, block_bytes / ranks, rounds).all_gather();
  const double reduce = measure_shm_floor(ranks, block_bytes, rounds).reduce_scatter;
  return (gather * (blocks + all / block) + reduce * all / block) / 1e3;
}

double host_us_per_unit(int rounds) {
  const RankContextGuard guard(RankContext::create());
  init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  const TrainModel plain = make_train_model("tiny"), sharded = make_train_model("tiny");
  shard(sharded);
  // A small difference of two times needs more rounds than the times themselves.
  const auto times = microseconds({make_step(plain, Optimizer::None), make_step(sharded, Optimizer::None)}, cpu_us,
                                  20 * rounds, /*steps=*/5);
  destroy_process_group();
  return (times[1] - times[0]) / static_cast<double>(plain.blocks.size());
}

void run(const StepOptions& own, const BenchmarkOptions& options) {
  TORCH_CHECK(!own.host_only || own.size == "tiny", "--host-only goes with --size tiny");
  Results peer, shm, gloo;
  double communication = 0;
  const auto print = [&](const std::string& name, double value, const char* unit) {
    print_result(name, value, unit, peer, options.json);
  };
  if (!own.host_only) {
    communication = communication_floor_ms(own.size, own.ranks, options.rounds);  // before there are threads
    shm = launch_ranks(own.ranks, "shm");
    gloo = launch_ranks(own.ranks, "gloo");
    peer = run_peer("benchmarks/peers/fully_shard_step_peer.py",
                    fmt::format("--size {} --ranks {} --rounds {}", own.size, own.ranks, options.rounds));
  }
  if (own.size == "tiny") {
    print("fully_shard/host_us_per_unit", host_us_per_unit(options.rounds), "us");
  }
  if (!own.host_only) {
    const auto threads = thread_ranks(own.ranks, [&] { return measure_step(own.size, false, options.rounds); });
    const double step = shm.at("sharded"), plain = shm.at("plain"), forward_backward = shm.at("forward_backward");
    const double ideal_step = ideal(plain, forward_backward, own.ranks);
    const double side_by_side = shm.at("side_by_side");
    const double floor = communication + ideal(side_by_side, shm.at("side_by_side_forward_backward"), own.ranks);
    print("fully_shard/threads_step_ms", threads.at("sharded"), "ms");
    print("fully_shard/shm_step_ms", step, "ms");
    print("fully_shard/gloo_step_ms", gloo.at("sharded"), "ms");
    print("plain/step_ms", plain, "ms");
    print("plain/forward_backward_ms", forward_backward, "ms");
    print("fully_shard/shm_over_plain", step / plain, "x");
    print("fully_shard/shm_over_ideal", step / ideal_step, "x");
    print("plain/side_by_side_step_ms", side_by_side, "ms");
    print("floor/communication_ms", communication, "ms");
    print("floor/step_ms", floor, "ms");
    print("floor/over_plain", floor / plain, "x");
    print("floor/over_ideal", floor / ideal_step, "x");
    print("fully_shard/shm_over_floor", step / floor, "x");
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  StepOptions own;
  const auto add_options = [&](CLI::App& app) {
    app.add_option("--size", own.size, "The model (benchmarks/train_model.h)")
        ->check(CLI::IsMember(train_model_sizes()));
    app.add_option("--ranks", own.ranks, "Ranks")->check(CLI::Range(1, 64));
    app.add_flag("--host-only", own.host_only, "host_us_per_unit alone, which needs no other ranks and no peer");
  };
  return benchmark_main(
      argc, argv,
      {.name = "fully_shard_step",
       .description = "What a training step costs under fully_shard, beside the plain model in one process.",
       .add_options = add_options,
       .run = [&](const BenchmarkOptions& options) { run(own, options); },
       .on_rank =
           [&](const BenchmarkOptions& options) {
             // A group of one rank has no backend to query.
             const bool beside_plain = get_world_size() == 1 || get_backend(default_group()) == "shm";
             return measure_step(own.size, beside_plain, options.rounds);
           }});
}
