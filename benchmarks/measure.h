#pragma once
// What the benchmarks share: their command line, ranks, times, memory, a peer's results, and output.
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

/// The options that every benchmark has, beside --help and --version.
struct BenchmarkOptions {
  /// --json: one JSON object a measurement.
  bool json = false;
  /// --rounds N: rounds of which the fastest counts.
  int rounds = 0;
};

struct Benchmark {
  std::string name;
  /// What --help says.
  std::string description;
  /// The default of --rounds; 0: it has no such option.
  int rounds = 15;
  /// Options of its own.
  std::function<void(CLI::App&)> add_options = {};
  std::function<void(const BenchmarkOptions&)> run;
  /// What rank 0 reports where launch_ranks() started this process as a rank.
  std::function<Results(const BenchmarkOptions&)> on_rank = {};
};

/// A benchmark's main: parses the options, refuses unknown ones, and runs `run`, or, in a rank, `on_rank`; one thread a
/// process. Errors go to stderr.
int benchmark_main(int argc, char** argv, const Benchmark& benchmark);

/// Starts this program as `nproc` ranks with its own arguments, and returns what rank 0's `on_rank` did. With a
/// backend, their default group is over it; without, `on_rank` makes groups itself. Throws where a rank failed.
Results launch_ranks(int nproc, const std::string& backend = "");

/// What rank 0 returns among `nproc` ranks that are threads.
Results thread_ranks(int nproc, const std::function<Results()>& measure);

/// Microseconds that went by, and that the calling thread computed.
double wall_us();
double cpu_us();

/// Microseconds of each call by `clock`: the fastest of `rounds` rounds of `steps` calls, since what else the machine
/// does only adds to it. The calls take turns, so that they meet the same machine. One round before is not counted.
std::vector<double> microseconds(const std::vector<std::function<void()>>& calls, double (*clock)(), int rounds,
                                 int steps = 20);

/// The most bytes that this process had in memory since the last reset_peak(), which returns what it has now; what it
/// reads of other ranks where they have it is theirs (examples/train_gpt/peak_memory.h).
double peak_bytes();
double reset_peak();

/// The lines "name value" that the Python script prints under PEER_PYTHON, given these arguments; nothing where that is
/// not set. Throws where it fails or prints none.
Results run_peer(const std::string& script, const std::string& arguments);

/// One line, with the peer's value and ours / peer where it has one.
void print_result(const std::string& name, double value, const std::string& unit, const Results& peer, bool json);

}  // namespace tessera
