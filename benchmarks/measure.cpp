#include "benchmarks/measure.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <fstream>
#include <string_view>

#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "testing/run_ranks.h"

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSteps = 20;  // a round
constexpr const char* kResultFile = "STEP_BENCHMARK_RESULT";
constexpr const char* kBackend = "STEP_BENCHMARK_BACKEND";

void measure_as_rank(int rounds, const std::function<double(int)>& on_rank) {
  init_process_group(ProcessGroupOptions{.backend = std::getenv(kBackend)});
  const double result = on_rank(rounds);
  if (get_rank() == 0) {
    std::ofstream(std::getenv(kResultFile)) << result;
  }
  destroy_process_group();
}

}  // namespace

StepBenchmark StepBenchmark::from_arguments(int argc, char** argv) {
  StepBenchmark benchmark;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    benchmark.json = benchmark.json || argument == "--json";
    benchmark.host_only = benchmark.host_only || argument == "--host-only";
    if (argument == "--rounds" && i + 1 < argc) {
      benchmark.rounds = std::stoi(argv[i + 1]);
    }
  }
  return benchmark;
}

double wall_us() {
  return std::chrono::duration<double, std::micro>(Clock::now().time_since_epoch()).count();
}

double cpu_us() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

std::vector<double> microseconds(const std::vector<std::function<void()>>& calls, double (*clock)(), int rounds) {
  std::vector<double> best(calls.size(), 1e30);
  for (int round = -1; round < rounds; ++round) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const double start = clock();
      for (int step = 0; step < kSteps; ++step) {
        calls[i]();
      }
      best[i] = round < 0 ? best[i] : std::min(best[i], (clock() - start) / kSteps);
    }
  }
  return best;
}

Results run_peer(const std::string& script) {
  Results results;
  const char* const python = std::getenv("PEER_PYTHON");
  if (python == nullptr) {
    return results;
  }
  FILE* const pipe = popen(fmt::format("'{}' '{}'", python, script).c_str(), "r");
  TORCH_CHECK(pipe != nullptr, "PEER_PYTHON does not start: ", python);
  std::array<char, 128> name;
  double value = 0;
  while (std::fscanf(pipe, "%127s %lf", name.data(), &value) == 2) {
    results[name.data()] = value;
  }
  TORCH_CHECK(pclose(pipe) == 0, "PEER_PYTHON failed: ", python);
  return results;
}

void print_result(const std::string& name, double value, const std::string& unit, const Results& peer, bool json) {
  const auto found = peer.find(name);
  const bool has_peer = found != peer.end();
  if (json) {
    fmt::print("{{\"name\": \"{}\", \"value\": {:.4g}, \"unit\": \"{}\"{}}}\n", name, value, unit,
               has_peer
                   ? fmt::format(", \"peer_value\": {:.4g}, \"ratio\": {:.4g}", found->second, value / found->second)
                   : "");
  } else {
    fmt::print("{:32} {:10.4g} {}{}\n", name, value, unit,
               has_peer ? fmt::format("   PyTorch {:.4g}, ratio {:.3f}", found->second, value / found->second) : "");
  }
  std::fflush(stdout);
}

double measure_in_processes(int nproc, const std::string& backend) {
  const char* const folder = std::getenv("TMPDIR");
  const std::string path =
      fmt::format("{}/step_benchmark.{}", folder ? folder : "/tmp", Clock::now().time_since_epoch().count());
  const int code = launch_local(
      {.nproc = nproc, .environment = {{kResultFile, path}, {kBackend, backend}, {"OMP_NUM_THREADS", "1"}}});
  double result = 0;
  const bool is_read = code == 0 && std::ifstream(path) >> result;
  std::remove(path.c_str());
  TORCH_CHECK(is_read, "the ranks ended with exit code ", code, " and no result");
  return result;
}

double measure_in_threads(int nproc, const std::function<double()>& measure) {
  double result = 0;
  run_ranks(nproc, [&](int rank) {
    const double own = measure();
    if (rank == 0) {
      result = own;
    }
  });
  return result;
}

int benchmark_main(const std::string& name, int argc, char** argv, const std::function<void(const StepBenchmark&)>& run,
                   const std::function<double(int)>& on_rank) {
  at::set_num_threads(1);
  try {
    const auto benchmark = StepBenchmark::from_arguments(argc, argv);
    if (launched_as_rank()) {
      measure_as_rank(benchmark.rounds, on_rank);
    } else {
      run(benchmark);
    }
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}: {}\n", name, error.what());
    return 1;
  }
}

}  // namespace tessera
