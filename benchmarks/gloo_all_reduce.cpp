// Cost of an all_reduce over gloo compared with PyTorch's: `PEER_PYTHON=... ./bazelw run //benchmarks:gloo_all_reduce`
// (--ranks N: more than 2 ranks; --turns N: number of alternating measurements of both sides).
//
// Sizes are bytes of the tensor, float32. Times are of one call: the fastest of the rounds of all turns.

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "benchmarks/measure.h"
#include "comm/collectives.h"
#include "comm/process_group.h"

namespace tessera {
namespace {

constexpr int64_t kKibibytes[] = {4, 16, 64, 256, 1024, 4096, 16384, 65536};

Results measure_as_rank(const BenchmarkOptions& options) {
  constexpr int64_t kBytesOfRound = 64 << 20;
  constexpr int64_t kMostCalls = 200;
  Results results;
  for (const int64_t kibibytes : kKibibytes) {
    const at::Tensor tensor = at::zeros({kibibytes * 256});
    const auto calls = static_cast<int>(std::clamp(kBytesOfRound / (kibibytes << 10), int64_t{2}, kMostCalls));
    const auto round = [&] {
      barrier(default_group());
      const double start = wall_us();
      for (int i = 0; i < calls; ++i) {
        all_reduce(tensor, ReduceOp::Sum, default_group());
      }
      return (wall_us() - start) / calls;
    };
    round();
    double best = round();
    for (int i = 1; i < options.rounds; ++i) {
      best = std::min(best, round());
    }
    results[fmt::format("{:05}KiB_us", kibibytes)] = best;
  }
  return results;
}

void keep_fastest(Results& fastest, const Results& turn) {
  for (const auto& [name, value] : turn) {
    const auto known = fastest.try_emplace(name, value).first;
    known->second = std::min(known->second, value);
  }
}

void run(int ranks, int turns, const BenchmarkOptions& options) {
  Results ours, peer;
  for (int turn = 0; turn < turns; ++turn) {
    keep_fastest(ours, launch_ranks(ranks, "gloo"));
    keep_fastest(peer, run_peer("benchmarks/peers/gloo_all_reduce_peer.py",
                                fmt::format("--ranks {} --rounds {}", ranks, options.rounds)));
  }
  for (const auto& [name, value] : ours) {
    print_result(name, value, "us", peer, options.json);
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  int ranks = 2, turns = 3;
  const auto add_options = [&](CLI::App& app) {
    app.add_option("--ranks", ranks, "Ranks")->check(CLI::Range(2, 64));
    app.add_option("--turns", turns, "Turns of both sides")->check(CLI::Range(1, 100));
  };
  return benchmark_main(argc, argv,
                        {.name = "gloo_all_reduce",
                         .description = "What an all_reduce over gloo costs beside PyTorch's.",
                         .rounds = 5,
                         .add_options = add_options,
                         .run = [&](const BenchmarkOptions& options) { run(ranks, turns, options); },
                         .on_rank = measure_as_rank});
}
