// What collectives of 2 ranks cost over each backend for CPU tensors: `./bazelw run //benchmarks:collectives`
// (--json, --rounds N as in measure.h; --ranks N).
//
// Sizes are bytes of a rank's input for all_gather, and of the whole tensor for reduce_scatter and all_reduce; float32.
// "floor" is data that lies in shared memory already, two barriers, and the copy or the sum (shm_floor.h); "memcpy" is
// the copy of all_gather's output alone. Times are of one call with its wait, the fastest of the rounds.

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string_view>

#include "benchmarks/measure.h"
#include "benchmarks/shm_floor.h"
#include "comm/collectives.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "testing/run_ranks.h"

namespace tessera {
namespace {

constexpr int64_t kSizes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20};
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

void measure_as_rank(int rounds) {
  Results results;
  for (const char* backend : {"shm", "gloo"}) {
    init_process_group(ProcessGroupOptions{.backend = backend});
    results.merge(measure_backend(backend, rounds));
    if (get_rank() == 0) {
      write_results(results);
    }
    destroy_process_group();
  }
}

void print_table(const Results& results) {
  const auto cell = [&](const char* collective, int64_t bytes, const char* who) {
    const auto found = results.find(key(collective, bytes, who));
    return found == results.end() ? std::string("-") : fmt::format("{:.1f}", found->second);
  };
  fmt::print("{:24}{:>10}{:>10}{:>10}{:>10}{:>10}   us\n", "", "shm", "gloo", "threads", "floor", "memcpy");
  for (const char* collective : kCollectives) {
    for (const int64_t bytes : kSizes) {
      fmt::print("{:24}", fmt::format("{} {}", collective, size_name(bytes)));
      for (const char* who : {"shm", "gloo", "threads", "floor", "memcpy"}) {
        fmt::print("{:>10}", cell(collective, bytes, who));
      }
      fmt::print("\n");
    }
  }
}

void run(int ranks, const StepBenchmark& benchmark) {
  Results results;
  for (const int64_t bytes : kSizes) {
    const FloorTimes floor = measure_shm_floor(ranks, bytes, benchmark.rounds);
    results[key("all_gather", bytes, "floor")] = floor.all_gather;
    results[key("all_gather", bytes, "memcpy")] = floor.copy;
    results[key("reduce_scatter", bytes, "floor")] = floor.reduce_scatter;
  }
  results.merge(launch_ranks(ranks));
  run_ranks(ranks, [&](int rank) {
    Results of_rank = measure_backend("threads", benchmark.rounds);
    if (rank == 0) {
      results.merge(std::move(of_rank));
    }
  });
  if (!benchmark.json) {
    return print_table(results);
  }
  for (const auto& [name, value] : results) {
    print_result(name, value, "us", {}, /*json=*/true);
  }
}

int ranks_from(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string_view(argv[i]) == "--ranks") {
      return std::stoi(argv[i + 1]);
    }
  }
  return 2;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    const auto benchmark = tessera::StepBenchmark::from_arguments(argc, argv);
    if (tessera::launched_as_rank()) {
      at::set_num_threads(1);
      tessera::measure_as_rank(benchmark.rounds);
    } else {
      tessera::run(tessera::ranks_from(argc, argv), benchmark);
    }
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "collectives: {}\n", error.what());
    return 1;
  }
}
