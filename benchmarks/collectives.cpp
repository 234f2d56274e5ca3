// Cost of collectives of 2 ranks over each backend for CPU tensors: `./bazelw run //benchmarks:collectives` (--ranks N
// for more ranks).
//
// Sizes are bytes of a rank's input for all_gather, and of the whole tensor for reduce_scatter and all_reduce; float32.
// "lent" is shm with the input of an all_gather in shared memory, like flat shards (comm/shm/shared_memory.h).
// all_gather_bf16 returns such inputs in bfloat16: the sender casts them or, for "lent", the readers. "floor" is two
// barriers and, on data already in shared memory, the sum or the faster of a plain copy and one that bypasses the cache
// (shm_floor.h). "streamed" is the same with copies that bypass the cache, and "memcpy" the plain copy of all_gather's
// output alone. Times are of one call with its wait: the fastest of the rounds.
//
// From 1 MiB on, the output includes the bus bandwidth, as in NVIDIA's nccl-tests: the bytes that a rank must receive
// (for all_reduce, those of a reduce_scatter and an all_gather), divided by the time; for memcpy, the bytes that it
// copies. --json adds shm's time divided by the floor, for the largest size.
//
// If PEER_PYTHON names a Python with torch, collectives_peer.py measures gloo there, which is also the peer of shm.

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string_view>

#include "benchmarks/measure.h"
#include "benchmarks/shm_floor.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "comm/shm/shared_memory.h"

namespace tessera {
namespace {

constexpr int64_t kSizes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20};
constexpr int64_t kBandwidthFrom = 1 << 20;
constexpr int64_t kFloorSize = 16 << 20;
constexpr const char* kMeasured[] = {"shm", "lent", "gloo", "threads", "floor", "streamed", "memcpy"};
constexpr const char* kCollectives[] = {"all_gather", "all_gather_bf16", "reduce_scatter", "all_reduce"};

std::string size_name(int64_t bytes) {
  return bytes < 1 << 20 ? fmt::format("{}KiB", bytes >> 10) : fmt::format("{}MiB", bytes >> 20);
}

std::string key(std::string_view collective, int64_t bytes, std::string_view who) {
  return fmt::format("{}/{}/{}_us", collective, size_name(bytes), who);
}

/// Returns the microseconds of a call over the default group. Every rank makes the same number of calls.
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
    const at::Tensor cast = at::zeros({count}, at::kBFloat16), all_cast = at::zeros({ranks * count}, at::kBFloat16);
    results[key("all_gather", bytes, backend)] = call_us([&] { all_gather(all, whole, group); }, bytes, rounds);
    const auto gather_cast = [&] {
      cast.copy_(whole);
      all_gather(all_cast, cast, group);
    };
    results[key("all_gather_bf16", bytes, backend)] = call_us(gather_cast, bytes, rounds);
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
    const auto parts = std::make_shared<const std::vector<TensorSegment>>(
        1, TensorSegment{.numel = count, .tensor = at::zeros({get_world_size() * count}, at::kBFloat16)});
    const auto gather_cast = [&] {
      auto pending = all_gather_segments_async(parts, own, default_group());
      pending.wait();
      pending.wait_for_readers();
    };
    results[key("all_gather_bf16", bytes, "lent")] = call_us(gather_cast, bytes, rounds);
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

/// Returns the number of bytes that a rank must receive from the others.
double bus_bytes(std::string_view collective, int64_t bytes, int ranks) {
  const auto others = static_cast<double>(bytes) * (ranks - 1);
  if (collective == "all_gather") {
    return others;
  }
  if (collective == "all_gather_bf16") {
    return others / 2;
  }
  return others / ranks * (collective == "all_reduce" ? 2 : 1);
}

/// Returns GB/s by the keys of a size's times, for the keys in `times`.
Results bandwidths(const Results& times, int ranks) {
  Results results;
  for (const char* collective : kCollectives) {
    for (const int64_t bytes : kSizes) {
      for (const std::string_view who : kMeasured) {
        const auto time = times.find(key(collective, bytes, who));
        if (bytes >= kBandwidthFrom && time != times.end()) {
          const double moved =
              who == "memcpy" ? static_cast<double>(bytes) * ranks : bus_bytes(collective, bytes, ranks);
          results[time->first] = moved / time->second * 1e-3;
        }
      }
    }
  }
  return results;
}

void print_table(const char* unit, const Results& results, const Results& peer) {
  const auto cell = [](const Results& from, const char* collective, int64_t bytes, const char* who) {
    const auto found = from.find(key(collective, bytes, who));
    return found == from.end() ? std::string("-") : fmt::format("{:.1f}", found->second);
  };
  fmt::print("{:24}", "");
  for (const char* who : kMeasured) {
    fmt::print("{:>10}", who);
  }
  fmt::print("{:>14}   {}\n", "PyTorch gloo", unit);
  for (const char* collective : kCollectives) {
    for (const int64_t bytes : kSizes) {
      if (!results.contains(key(collective, bytes, "shm"))) {
        continue;
      }
      fmt::print("{:24}", fmt::format("{} {}", collective, size_name(bytes)));
      for (const char* who : kMeasured) {
        fmt::print("{:>10}", cell(results, collective, bytes, who));
      }
      fmt::print("{:>14}\n", cell(peer, collective, bytes, "gloo"));
    }
  }
}

std::string bandwidth_name(std::string time_name) {
  return time_name.replace(time_name.rfind("_us"), 3, "_GB_per_s");
}

void print_json(const Results& results, const Results& peer, int ranks) {
  const Results by_time = bandwidths(results, ranks), peer_by_time = bandwidths(peer, ranks);
  Results peer_bandwidths;
  for (const auto& [name, value] : peer_by_time) {
    peer_bandwidths[bandwidth_name(name)] = value;
  }
  for (const char* collective : kCollectives) {
    for (const int64_t bytes : kSizes) {
      for (const char* who : kMeasured) {
        const auto name = key(collective, bytes, who);
        if (results.contains(name)) {
          print_result(name, results.at(name), "us", peer, /*json=*/true);
        }
        if (by_time.contains(name)) {
          print_result(bandwidth_name(name), by_time.at(name), "GB/s", peer_bandwidths, /*json=*/true);
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
    results[key("all_gather", bytes, "floor")] = floor.all_gather();
    results[key("all_gather", bytes, "streamed")] = floor.all_gather_streamed;
    results[key("all_gather", bytes, "memcpy")] = floor.copy;
    results[key("reduce_scatter", bytes, "floor")] = floor.reduce_scatter;
  }
  results.merge(launch_ranks(ranks));
  auto peer =
      run_peer("benchmarks/peers/collectives_peer.py", fmt::format("--ranks {} --rounds {}", ranks, options.rounds));
  results.merge(thread_ranks(ranks, [&] { return measure_backend("threads", options.rounds); }));
  if (options.json) {
    return print_json(results, peer, ranks);
  }
  print_table("us", results, peer);
  print_table("GB/s", bandwidths(results, ranks), bandwidths(peer, ranks));
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
