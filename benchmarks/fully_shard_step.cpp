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
//   fused_adamw/...                CPU time of at::_fused_adamw_ on sharded parameters, and that divided by its time on
//                                  plain tensors of the local sizes; likewise fused_sgd
//
// Where PEER_PYTHON names a Python that has torch, fully_shard_step_peer.py measures the same there.

#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>

#include <memory>

#include "benchmarks/fully_shard_step_model.h"
#include "benchmarks/measure.h"
#include "comm/process_group.h"
#include "comm/rank_context.h"
#include "dtensor/dtensor.h"
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

/// What a fused optimizer step works on.
struct OptimizerTensors {
  std::vector<at::Tensor> params, grads, averages, squares, steps;

  /// `count` parameters whose local tensors have these sizes: plain, or rows of DTensors on `mesh`.
  OptimizerTensors(int count, at::IntArrayRef sizes, const DeviceMesh* mesh) {
    for (int i = 0; i < count; ++i) {
      for (auto* list : {&params, &grads, &averages, &squares}) {
        const auto local = at::rand(sizes);
        list->push_back(mesh ? from_local(local, *mesh, {Shard(0)}) : local);
      }
      steps.push_back(at::zeros({}));
    }
  }
  void adamw() const {
    at::_fused_adamw_(params, grads, averages, squares, {}, steps, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
  }
  void sgd() const { at::_fused_sgd_(params, grads, averages, 0.01, 0.9, 1e-3, 0.0, false, false, false); }
};

using PrintValue = std::function<void(const std::string& name, double value, const char* unit)>;

/// Many small parameters, where overhead is all there is, and few large ones.
void measure_fused_optimizers(int rounds, const PrintValue& print) {
  const RankContextGuard guard(RankContext::create());
  init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  const auto mesh = init_device_mesh(at::kCPU, {2});
  struct Case {
    const char* name;
    int count;
    std::vector<int64_t> local_sizes;
  };
  for (const auto& [name, count, sizes] : {Case{"192_small", 192, {8, 16}}, Case{"4_large", 4, {512, 1024}}}) {
    const OptimizerTensors plain(count, sizes, nullptr), sharded(count, sizes, &mesh);
    const auto times =
        microseconds({[&] { plain.adamw(); }, [&] { sharded.adamw(); }, [&] { plain.sgd(); }, [&] { sharded.sgd(); }},
                     cpu_us, 10 * rounds);
    for (const size_t i : {0, 2}) {
      const auto test = fmt::format("{}/{}", i == 0 ? "fused_adamw" : "fused_sgd", name);
      print(test + "_us", times[i + 1], "us");
      print(test + "_ratio", times[i + 1] / times[i], "x");
    }
  }
  destroy_process_group();
}

void run(const StepBenchmark& benchmark) {
  Results peer;
  const auto print = [&](const std::string& name, double value, const char* unit) {
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
  measure_fused_optimizers(rounds, print);
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
