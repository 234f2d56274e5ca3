#include "benchmarks/measure.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
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

#include "comm/launcher/local_launcher.h"
#include "comm/launcher/rank_heap.h"
#include "comm/process_group.h"
#include "comm/shared_gradients.h"
#include "examples/train_gpt/peak_memory.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;
constexpr const char* kResultFile = "TESSERA_BENCHMARK_RESULTS";
constexpr const char* kBackend = "TESSERA_BENCHMARK_BACKEND";
constexpr const char* kMoreHelp =
    "Where PEER_PYTHON names a Python that has torch, PyTorch's numbers stand beside ours, if there are any.\n";

std::string version() {
  std::string compiler = __VERSION__;
#ifndef __clang__
  compiler = "g++ " + compiler;
#endif
#ifndef __OPTIMIZE__
  compiler += " without optimisation";
#endif
  return fmt::format("{}\nlibtorch {}", compiler, TORCH_VERSION);
}

/// Lines "name value"; a name may have blanks in it.
Results read_results(std::istream&& lines) {
  Results results;
  for (std::string line; std::getline(lines, line);) {
    const size_t blank = line.rfind(' ');
    TORCH_CHECK(blank != std::string::npos, "not a line \"name value\": ", line);
    results[line.substr(0, blank)] = std::stod(line.substr(blank + 1));
  }
  return results;
}

void report_as_rank(const Benchmark& benchmark, const BenchmarkOptions& options) {
  const char* const file_name = std::getenv(kResultFile);
  TORCH_CHECK(file_name != nullptr && benchmark.on_rank, "it starts its ranks itself: run it without a launcher");
  const std::string backend = std::getenv(kBackend);
  if (!backend.empty()) {
    enable_shared_gradients();
    init_process_group(ProcessGroupOptions{.backend = backend});
  }
  const bool is_first = std::getenv("RANK") == std::string("0");
  const Results results = benchmark.on_rank(options);
  if (!backend.empty()) {
    destroy_process_group();
  }
  if (is_first) {
    std::ofstream file(file_name);
    for (const auto& [name, value] : results) {
      file << name << ' ' << value << '\n';
    }
  }
}

}  // namespace

int benchmark_main(int argc, char** argv, const Benchmark& benchmark) {
  BenchmarkOptions options{.rounds = benchmark.rounds};
  CLI::App app(benchmark.description, benchmark.name);
  app.option_defaults()->always_capture_default();
  app.footer(kMoreHelp);
  app.set_version_flag("--version", version(), "Compiler and libtorch");
  app.add_flag("--json", options.json, "One JSON object a measurement");
  if (options.rounds > 0) {
    app.add_option("--rounds", options.rounds, "Rounds of which the fastest counts")->check(CLI::Range(1, 1000000));
  }
  if (benchmark.add_options) {
    benchmark.add_options(app);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 1;
  }
  at::set_num_threads(1);
  try {
    if (launched_as_rank()) {
      report_as_rank(benchmark, options);
    } else {
      benchmark.run(options);
    }
    return 0;
  } catch (const c10::Error& error) {
    fmt::print(stderr, "{}: {}\n", benchmark.name, error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}: {}\n", benchmark.name, error.what());
    return 1;
  }
}

Results launch_ranks(int nproc, const std::string& backend) {
  const testing::TempFolder folder;
  const std::string path = folder.path("results");
  const int code = launch_local(
      {.nproc = nproc, .environment = {{kResultFile, path}, {kBackend, backend}, {"OMP_NUM_THREADS", "1"}}});
  TORCH_CHECK(code == 0, "the ranks ended with exit code ", code);
  return read_results(std::ifstream(path));
}

Results thread_ranks(int nproc, const std::function<Results()>& measure) {
  Results results;
  run_ranks(nproc, [&](int rank) {
    Results own = measure();
    if (rank == 0) {
      results = std::move(own);
    }
  });
  return results;
}

double wall_us() {
  return std::chrono::duration<double, std::micro>(Clock::now().time_since_epoch()).count();
}

double cpu_us() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

std::vector<double> microseconds(const std::vector<std::function<void()>>& calls, double (*clock)(), int rounds,
                                 int steps) {
  std::vector<double> best(calls.size(), 1e30);
  for (int round = -1; round < rounds; ++round) {
    for (size_t i = 0; i < calls.size(); ++i) {
      const double start = clock();
      for (int step = 0; step < steps; ++step) {
        calls[i]();
      }
      best[i] = round < 0 ? best[i] : std::min(best[i], (clock() - start) / steps);
    }
  }
  return best;
}

double peak_bytes() {
  return examples::peak_memory_bytes(c10::DeviceType::CPU);
}

double reset_peak() {
  std::ofstream("/proc/self/clear_refs") << 5;
  return peak_bytes();
}

Results run_peer(const std::string& script, const std::string& arguments) {
  const char* const python = std::getenv("PEER_PYTHON");
  if (python == nullptr) {
    return {};
  }
  std::string command = "OMP_NUM_THREADS=1";
  for (const auto& [name, value] : kRankHeap) {  // as for our ranks
    command += fmt::format(" {}={}", name, value);
  }
  command += fmt::format(" '{}' '{}' {}", python, script, arguments);
  FILE* const pipe = popen(command.c_str(), "r");
  TORCH_CHECK(pipe != nullptr, "PEER_PYTHON does not start: ", python);
  std::string text;
  std::array<char, 256> part;
  while (std::fgets(part.data(), part.size(), pipe) != nullptr) {
    text += part.data();
  }
  TORCH_CHECK(pclose(pipe) == 0, "PEER_PYTHON=", python, " failed at ", script);
  auto results = read_results(std::istringstream(text));
  TORCH_CHECK(!results.empty(), "PEER_PYTHON=", python, " printed nothing at ", script);
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
    fmt::print("{:36} {:10.4g} {}{}\n", name, value, unit,
               has_peer ? fmt::format("   PyTorch {:.4g}, ratio {:.3f}", found->second, value / found->second) : "");
  }
  std::fflush(stdout);
}

}  // namespace tessera
