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
#include <istream>
#include <sstream>
#include <string_view>

#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSteps = 20;  // a round
constexpr const char* kResultFile = "STEP_BENCHMARK_RESULT";
constexpr const char* kResult = "result";
constexpr const char* kBackend = "STEP_BENCHMARK_BACKEND";

Results read_results(std::istream&& lines) {
  Results results;
  std::string name;
  double value = 0;
  while (lines >> name >> value) {
    results[name] = value;
  }
  return results;
}

void measure_as_rank(int rounds, const std::function<double(int)>& on_rank) {
  init_process_group(ProcessGroupOptions{.backend = std::getenv(kBackend)});
  const double result = on_rank(rounds);
  if (get_rank() == 0) {
    write_results({{kResult, result}});
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
  const char* const python = std::getenv("PEER_PYTHON");
  if (python == nullptr) {
    return {};
  }
  FILE* const pipe = popen(fmt::format("'{}' '{}'", python, script).c_str(), "r");
  TORCH_CHECK(pipe != nullptr, "PEER_PYTHON does not start: ", python);
  std::string text;
  std::array<char, 256> part;
  while (std::fgets(part.data(), part.size(), pipe) != nullptr) {
    text += part.data();
  }
  TORCH_CHECK(pclose(pipe) == 0, "PEER_PYTHON failed: ", python);
  return read_results(std::istringstream(text));
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

Results launch_ranks(int nproc, const std::vector<std::pair<std::string, std::string>>& environment) {
  const testing::TempFolder folder;
  const std::string path = folder.path("results");
  LaunchOptions options{.nproc = nproc, .environment = environment};
  options.environment.insert(options.environment.end(), {{kResultFile, path}, {"OMP_NUM_THREADS", "1"}});
  const int code = launch_local(options);
  TORCH_CHECK(code == 0, "the ranks ended with exit code ", code);
  return read_results(std::ifstream(path));
}

void write_results(const Results& results) {
  std::ofstream file(std::getenv(kResultFile));
  for (const auto& [name, value] : results) {
    file << name << ' ' << value << '\n';
  }
}

double measure_in_processes(int nproc, const std::string& backend) {
  return launch_ranks(nproc, {{kBackend, backend}}).at(kResult);
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
