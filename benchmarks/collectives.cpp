// What collectives of 2 ranks cost over each backend for CPU tensors: `./bazelw run //benchmarks:collectives`
// (--ranks N: of more).
//
// Sizes are bytes of a rank's input for all_gather, and of the whole tensor for reduce_scatter and all_reduce; float32.
// "lent" is shm where the input of an all_gather lies in shared memory, as flat shards do (comm/shared_memory.h).
// "floor" is data that lies in shared memory already, two barriers, and the copy or the sum (shm_floor.h); "streamed"
// is the same with copies past the cache, and "memcpy" the copy of all_gather's output alone. Times are of one call
// with its wait, the fastest of the rounds. --json also gives shm's time divided by the floor, of the largest size.
//
// Where PEER_PYTHON names a Python that has torch, collectives_peer.py measures gloo there: it is the peer of shm, too.

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string_view>

#include "benchmarks/measure.h"
#include "benchmarks/shm_floor.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "comm/shared_memory.h"

namespace tessera {
namespace {

constexpr int64_t kSizes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20};
constexpr int64_t kFloorSize = 16 << 20;
constexpr const char* kMeasured[] = {"shm", "lent", "gloo", "threads", "floor", "streamed", "memcpy"};
constexpr const char* kCollectives[] = {"all_gather", "reduce_scatter", "all_reduce"};

std::string size_name(int64_t bytes) {
  return bytes < 1 << 20 ? fmt::format("{}KiB", bytes >> 10) : fmt::format("{}MiB", bytes >> 20);
}

std::string key(std::string_view collective, int64_t bytes, std::string_view who) {
  return fmt::format("{}/{}/{}_us", collective, size_name(bytes), who);
}

/// Microseconds of a call, over the default group. Every rank makes as many calls.
double call_us(const std::function<void()>& call, int64_t bytes, int rounds) {
  const int calls = bytes > 1000000 ? 4 : 200;
  double best = 1e30;
  for (int round = -1; round < rounds; ++round) {
    barrier(default_group());
    const double start = wall_us();
    for (int i = 0; i < calls; ++i) {
      call();
    }
    best = round < 0 ? best : std::min(best, (wall_us() - start) / calls);
  }
  return best;
}

Results measure_backend(const std::string& backend, int rounds) {
  const ProcessGroupPtr& group = default_group();
  const int64_t ranks = get_world_size();
  Results results;
  for (const int64_t bytes : kSizes) {
    const int64_t count = bytes / static_cast<int64_t>(sizeof(float));
    const at::Tensor whole = at::zeros({count}), part = at::zeros({count / ranks}), all = at::zeros({ranks * count});
    results[key("all_gather", bytes, backend)] = call_us([&] { all_gather(all, whole, group); }, bytes, rounds);
    results[key("reduce_scatter", bytes, backend)] = call_us(
        [&] { reduce_scatter(part, whole.narrow(0, 0, part.numel() * ranks), ReduceOp::Sum, group); }, bytes, rounds);
    results[key("all_reduce", bytes, backend)] =
        call_us([&] { all_reduce(whole, ReduceOp::Sum, group); }, bytes, rounds);
  }
  return results;
}

Results measure_lent(int rounds) {
  Results results;
  for (const int64_t bytes : kSizes) {
    const int64_t count = bytes / static_cast<int64_t>(sizeof(float));
    const at::Tensor own = shared_zeros(count, at::kFloat), all = at::zeros({get_world_size() * count});
    own.fill_(1);
    results[key("all_gather", bytes, "lent")] = call_us([&] { all_gather(all, own, default_group()); }, bytes, rounds);
  }
  return results;
}

Results measure_as_rank(const BenchmarkOptions& options) {
  Results results;
  for (const char* backend : {"shm", "gloo"}) {
    init_process_group(ProcessGroupOptions{.backend = backend});
    results.merge(measure_backend(backend, options.rounds));
    if (backend == std::string_view("shm")) {
      results.merge(measure_lent(options.rounds));
    }
    destroy_process_group();
  }
  return results;
}

void print_table(const Results& results, const Results& peer) {
  const auto cell = [](const Results& from, const char* collective, int64_t bytes, const char* who) {
    const auto found = from.find(key(collective, bytes, who));
    return found == from.end() ? std::string("-") : fmt::format("{:.1f}", found->second);
  };
  fmt::print("{:24}", "");
  for (const char* who : kMeasured) {
    fmt::print("{:>10}", who);
  }
  fmt::print("{:>14}   us\n", "PyTorch gloo");
  for (const char* collective : kCollectives) {
    for (const int64_t bytes : kSizes) {
      fmt::print("{:24}", fmt::format("{} {}", collective, size_name(bytes)));
      for (const char* who : kMeasured) {
        fmt::print("{:>10}", cell(results, collective, bytes, who));
      }
      fmt::print("{:>14}\n", cell(peer, collective, bytes, "gloo"));
    }
  }
}

void print_json(const Results& results, const Results& peer) {
  for (const char* collective : kCollectives) {
    for (const int64_t bytes : kSizes) {
      for (const char* who : kMeasured) {
        const auto found = results.find(key(collective, bytes, who));
        if (found != results.end()) {
          print_result(found->first, found->second, "us", peer, /*json=*/true);
        }
      }
    }
  }
  for (const char* collective : {"all_gather", "reduce_scatter"}) {
    const auto time = [&](const char* who) { return results.at(key(collective, kFloorSize, who)); };
    print_result(fmt::format("{}/{}/shm_over_floor", collective, size_name(kFloorSize)), time("shm") / time("floor"),
                 "x", {}, /*json=*/true);
  }
}

void run(int ranks, const BenchmarkOptions& options) {
  Results results;
  for (const int64_t bytes : kSizes) {
    const FloorTimes floor = measure_shm_floor(ranks, bytes, options.rounds);
    results[key("all_gather", bytes, "floor")] = floor.all_gather;
    results[key("all_gather", bytes, "streamed")] = floor.all_gather_streamed;
    results[key("all_gather", bytes, "memcpy")] = floor.copy;
    results[key("reduce_scatter", bytes, "floor")] = floor.reduce_scatter;
  }
  results.merge(launch_ranks(ranks));
  auto peer = run_peer("benchmarks/collectives_peer.py", fmt::format("--ranks {} --rounds {}", ranks, options.rounds));
  results.merge(thread_ranks(ranks, [&] { return measure_backend("threads", options.rounds); }));
  if (options.json) {
    return print_json(results, peer);
  }
  print_table(results, peer);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  int ranks = 2;
  const auto add_options = [&](CLI::App& app) { app.add_option("--ranks", ranks, "Ranks")->check(CLI::Range(1, 64)); };
  return benchmark_main(argc, argv,
                        {.name = "collectives",
                         .description = "What collectives of CPU tensors cost over each backend.",
                         .add_options = add_options,
                         .run = [&](const BenchmarkOptions& options) { run(ranks, options); },
                         .on_rank = measure_as_rank});
}
