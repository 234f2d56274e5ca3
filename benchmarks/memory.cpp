// The memory of a training step: `./bazelw run //benchmarks:memory`.
//
// Peak memory that a process adds while it builds, shards and trains the model "768" of train_model.h for three steps,
// as counted by the system as resident (VmHWM), including shared memory. If ranks read each other's memory
// (comm/shm/shared_memory.h), the system counts a page in each of them; here, it counts for its owner only.
//
//   fully_shard/peak_mib   of the rank with the highest peak, of 2 over shm
//   plain/peak_mib         of the plain model in one process
//   parameters_mib         the bytes of the parameters, for comparison
//
// If PEER_PYTHON names a Python with torch, fully_shard_step_peer.py --memory measures the same there, over gloo.

#include <ATen/ops/scalar_tensor.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "benchmarks/measure.h"
#include "benchmarks/train_model.h"
#include "comm/collectives.h"
#include "comm/process_group.h"

namespace tessera {
namespace {

constexpr double kMiB = 1 << 20;
constexpr int kSteps = 3;

struct MemoryOptions {
  std::string size = "768";
  int ranks = 2;
};

double parameter_bytes(const TrainModel& model) {
  double bytes = 0;
  for (const auto& parameter : model.module->parameters()) {
    bytes += static_cast<double>(parameter.nbytes());
  }
  return bytes;
}

/// With one rank, the model stays plain.
Results measure_peak(const std::string& size) {
  const double start = reset_peak();
  const TrainModel model = make_train_model(size);
  const double parameters = parameter_bytes(model);
  if (get_world_size() > 1) {
    shard(model);
  }
  const auto step = make_step(model, Optimizer::AdamW);
  for (int i = 0; i < kSteps; ++i) {
    step();
  }
  const auto peak = at::scalar_tensor(peak_bytes() - start, at::kDouble);
  all_reduce(peak, ReduceOp::Max, default_group());
  return {{"peak", peak.item<double>() / kMiB}, {"parameters", parameters / kMiB}};
}

void run(const MemoryOptions& own, const BenchmarkOptions& options) {
  const auto sharded = launch_ranks(own.ranks, "shm");
  const auto plain = launch_ranks(1, "shm");
  const auto peer = run_peer("benchmarks/peers/fully_shard_step_peer.py",
                             fmt::format("--memory --size {} --ranks {}", own.size, own.ranks));
  print_result("fully_shard/peak_mib", sharded.at("peak"), "MiB", peer, options.json);
  print_result("plain/peak_mib", plain.at("peak"), "MiB", peer, options.json);
  print_result("parameters_mib", plain.at("parameters"), "MiB", peer, options.json);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  MemoryOptions own;
  const auto add_options = [&](CLI::App& app) {
    app.add_option("--size", own.size, "The model (benchmarks/train_model.h)")
        ->check(CLI::IsMember(train_model_sizes()));
    app.add_option("--ranks", own.ranks, "Ranks of the sharded model")->check(CLI::Range(2, 64));
  };
  return benchmark_main(argc, argv,
                        {.name = "memory",
                         .description = "The memory of a training step under fully_shard, beside the plain model.",
                         .rounds = 0,
                         .add_options = add_options,
                         .run = [&](const BenchmarkOptions& options) { run(own, options); },
                         .on_rank = [&](const BenchmarkOptions&) { return measure_peak(own.size); }});
}
