// What an op on a DTensor costs: `./bazelw run //benchmarks:dtensor_dispatch`.
//
//   add, ...         the ops of dispatch_ops.h on DTensors
//   plain/add        the same op on plain tensors
//   add_over_plain   add / plain/add
//
// Where PEER_PYTHON names a Python that has torch, dtensor_dispatch_peer.py measures PyTorch's DTensor.

#include <ATen/core/grad_mode.h>
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "benchmarks/dispatch_ops.h"
#include "benchmarks/measure.h"
#include "comm/process_group.h"

namespace tessera {
namespace {

constexpr double kSecondsOfARound = 0.1;

void register_benchmark(const std::string& name, const DispatchOp& op, const DispatchOperands& operands, int rounds) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [op, operands](benchmark::State& state) {
                                 const at::NoGradGuard no_grad;
                                 for (auto _ : state) {
                                   op.run(operands);
                                 }
                               })
      ->Unit(benchmark::kMicrosecond)
      ->MinTime(kSecondsOfARound)
      ->Repetitions(rounds);
}

/// The fastest repetition of each benchmark, in microseconds: what else the machine does only adds to it.
class Fastest : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& /*context*/) override { return true; }

  void ReportRuns(const std::vector<Run>& runs) override {
    for (const auto& run : runs) {
      if (run.run_type == Run::RT_Iteration) {
        const double us = run.GetAdjustedRealTime();
        const auto [entry, is_new] = microseconds.try_emplace(run.run_name.function_name, us);
        entry->second = std::min(us, entry->second);
      }
    }
  }

  Results microseconds;
};

void run(const BenchmarkOptions& options) {
  init_process_group({.rank = 0, .world_size = 1});
  const auto plain = plain_operands();
  const auto dtensors = dtensor_operands();
  for (const auto& op : dispatch_ops()) {
    register_benchmark(op.name, op, dtensors, options.rounds);
    if (!op.dtensor_only) {
      register_benchmark(std::string("plain/") + op.name, op, plain, options.rounds);
    }
  }
  Fastest reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter);
  destroy_process_group();
  const auto peer = run_peer("benchmarks/peers/dtensor_dispatch_peer.py", fmt::format("--rounds {}", options.rounds));
  for (const auto& [name, us] : reporter.microseconds) {
    print_result(name, us, "us", peer, options.json);
  }
  const auto& us = reporter.microseconds;
  print_result("add_over_plain", us.at("add") / us.at("plain/add"), "x", peer, options.json);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::benchmark_main(argc, argv,
                                 {.name = "dtensor_dispatch",
                                  .description = "What an op on a DTensor costs, beside the same on plain tensors.",
                                  .rounds = 5,
                                  .run = tessera::run});
}
