#pragma once
// Common parts of benchmarks: command line, ranks, times, memory, a peer's results, and output.
//
//   void run(const BenchmarkOptions& options) {
//     print_result("add_us", microseconds({add}, wall_us, options.rounds)[0], "us", {}, options.json);
//   }
//   int main(int argc, char** argv) {
//     return benchmark_main(argc, argv, {.name = "add", .description = "What adding costs.", .run = run});
//   }

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace CLI {
class App;
}

namespace tessera {

/// Results by name.
using Results = std::map<std::string, double>;

/// Options of every benchmark, besides --help and --version.
struct BenchmarkOptions {
  /// --json: print a JSON object per measurement.
  bool json = false;
  /// --rounds N: take the fastest of N rounds.
  int rounds = 0;
};

struct Benchmark {
  std::string name;
  /// Text of --help.
  std::string description;
  /// Default of --rounds; 0 if there is no such option.
  int rounds = 15;
  /// Options of this benchmark.
  std::function<void(CLI::App&)> add_options = {};
  std::function<void(const BenchmarkOptions&)> run;
  /// Report of rank 0 if launch_ranks() started this process as a rank.
  std::function<Results(const BenchmarkOptions&)> on_rank = {};
};

/// Main function of a benchmark. It parses options, rejects unknown ones, and runs `run` or, in a rank, `on_rank`, with
/// one thread per process. Errors go to stderr.
int benchmark_main(int argc, char** argv, const Benchmark& benchmark);

/// Starts this program as `nproc` ranks with its arguments, and returns the result of rank 0's `on_rank`. With a
/// backend, they have a default group; otherwise `on_rank` makes groups itself. Throws if a rank failed.
Results launch_ranks(int nproc, const std::string& backend = "");

/// Returns the result of rank 0 among `nproc` ranks that are threads.
Results thread_ranks(int nproc, const std::function<Results()>& measure);

/// Return elapsed microseconds, and those that the calling thread computed.
double wall_us();
double cpu_us();

/// Returns microseconds per call by `clock`: the fastest of `rounds` rounds of `steps` calls, since other load only
/// adds time. Calls take turns, so that they see the same machine. One round before is not counted.
std::vector<double> microseconds(const std::vector<std::function<void()>>& calls, double (*clock)(), int rounds,
                                 int steps = 20);

/// Returns the peak memory in bytes since the last reset_peak(), which returns the current one. Memory of other ranks
/// that this process reads in place is not included (examples/train_gpt/peak_memory.h).
double peak_bytes();
double reset_peak();

/// Returns the lines "name value" that the Python script prints under PEER_PYTHON. Returns nothing if that is not set.
/// Throws if the script fails or prints none.
Results run_peer(const std::string& script, const std::string& arguments);

/// Prints one line, with the peer's value and the ratio ours / peer if available.
void print_result(const std::string& name, double value, const std::string& unit, const Results& peer, bool json);

}  // namespace tessera
