#pragma once
// What the benchmarks of whole training steps share: times, a peer's results, and output.
//
//   --json        one JSON object a measurement
//   --rounds N    rounds of which the fastest counts
//   --host-only   only what needs no other ranks and no peer

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

struct StepBenchmark {
  bool json = false;
  bool host_only = false;
  int rounds = 15;

  static StepBenchmark from_arguments(int argc, char** argv);
};

/// Microseconds that went by, and that the calling thread computed.
double wall_us();
double cpu_us();

/// Microseconds of each call by `clock`: the fastest of `rounds` rounds, since what else the machine does only adds to
/// it. The calls take turns, so that they meet the same machine.
std::vector<double> microseconds(const std::vector<std::function<void()>>& calls, double (*clock)(), int rounds);

/// Results by name.
using Results = std::map<std::string, double>;

/// The lines "name value" that the Python script prints under PEER_PYTHON; nothing where that is not set.
Results run_peer(const std::string& script);

/// One line, with the peer's value and ours / peer where it has one.
void print_result(const std::string& name, double value, const std::string& unit, const Results& peer, bool json);

/// Starts this program as `nproc` ranks, one thread each, with these environment variables; returns what rank 0 wrote
/// there by write_results(). Throws where a rank failed.
Results launch_ranks(int nproc, const std::vector<std::pair<std::string, std::string>>& environment = {});
void write_results(const Results& results);

/// What rank 0 measures in benchmark_main()'s `on_rank` among `nproc` processes over `backend`.
double measure_in_processes(int nproc, const std::string& backend);
/// What rank 0 measures among `nproc` ranks that are threads.
double measure_in_threads(int nproc, const std::function<double()>& measure);

/// A benchmark's main: runs `run`, or, where measure_in_processes started this process as a rank, `on_rank` with the
/// number of rounds. Errors go to stderr.
int benchmark_main(const std::string& name, int argc, char** argv, const std::function<void(const StepBenchmark&)>& run,
                   const std::function<double(int)>& on_rank);

}  // namespace tessera
