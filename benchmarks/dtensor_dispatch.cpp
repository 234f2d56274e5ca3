// What an op on a DTensor costs: `./bazelw run //benchmarks:dtensor_dispatch` (-- --json: one JSON object a
// measurement).
//
// Beside each op of dispatch_ops.h is the same on plain tensors. Where PEER_PYTHON names a Python that has torch,
// dtensor_dispatch_peer.py measures PyTorch's DTensor.

#include <ATen/core/grad_mode.h>
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "benchmarks/dispatch_ops.h"
#include "comm/process_group.h"

namespace tessera {
namespace {

constexpr const char* kPeerScript = "benchmarks/dtensor_dispatch_peer.py";

void register_benchmark(const std::string& name, const DispatchOp& op, const DispatchOperands& operands) {
  benchmark::RegisterBenchmark((std::string(op.name) + "/" + name).c_str(),
                               [op, operands](benchmark::State& state) {
                                 const at::NoGradGuard no_grad;
                                 for (auto _ : state) {
                                   op.run(operands);
                                 }
                               })
      ->Unit(benchmark::kMicrosecond)
      ->Repetitions(5)
      ->ReportAggregatesOnly(false);
}

/// The fastest repetition of each benchmark, in microseconds: what else the machine does only adds to it.
class Fastest : public benchmark::ConsoleReporter {
 public:
  explicit Fastest(bool quiet) : quiet_(quiet) {}

  bool ReportContext(const Context& context) override { return quiet_ || ConsoleReporter::ReportContext(context); }

  void ReportRuns(const std::vector<Run>& runs) override {
    for (const auto& run : runs) {
      if (run.run_type == Run::RT_Iteration) {
        const auto name = run.run_name.function_name;
        const double us = run.GetAdjustedRealTime();
        const auto found = microseconds.find(name);
        microseconds[name] = found == microseconds.end() ? us : std::min(us, found->second);
      }
    }
    if (!quiet_) {
      ConsoleReporter::ReportRuns(runs);
    }
  }

  std::map<std::string, double> microseconds;

 private:
  bool quiet_;
};

/// "name microseconds" lines of the peer; empty if PEER_PYTHON is not set. Throws ValueError if it measured nothing.
std::map<std::string, double> run_peer() {
  std::map<std::string, double> result;
  const char* python = std::getenv("PEER_PYTHON");
  if (!python) {
    return result;
  }
  FILE* pipe = popen(fmt::format("'{}' {}", python, kPeerScript).c_str(), "r");
  char line[256];
  while (pipe && std::fgets(line, sizeof line, pipe)) {
    const std::string text(line);
    const auto space = text.rfind(' ');
    if (space != std::string::npos) {
      result[text.substr(0, space)] = std::atof(text.c_str() + space);
    }
  }
  if (pipe) {
    pclose(pipe);
  }
  TESSERA_CHECK(ValueError, !result.empty(),
                "PEER_PYTHON={}: {} printed no measurement; name a python that has torch, and run by bazel run", python,
                kPeerScript);
  return result;
}

/// "   plain   0.61 us"; empty for what was not measured.
std::string column(const char* name, double microseconds) {
  return microseconds > 0 ? fmt::format("   {} {:6.2f} us", name, microseconds) : "";
}

void print_results(const std::map<std::string, double>& microseconds, bool json) {
  const auto peer = run_peer();
  const auto lookup = [](const auto& map, const std::string& key) {
    const auto found = map.find(key);
    return found == map.end() ? 0.0 : found->second;
  };
  for (const auto& op : dispatch_ops()) {
    const std::string name = op.name;
    const double ours = lookup(microseconds, name + "/dtensor");
    const double plain = lookup(microseconds, name + "/plain");
    const double theirs = lookup(peer, name);
    if (!json) {
      fmt::print("{:<26}{}{}{}\n", name, column("DTensor", ours), column("plain", plain), column("peer", theirs));
      continue;
    }
    nlohmann::json object{{"name", "dtensor_dispatch/" + name}, {"value", ours}, {"unit", "us"}};
    if (plain > 0) {
      object["plain_value"] = plain;
    }
    if (theirs > 0) {
      object["peer_value"] = theirs;
      object["ratio"] = ours / theirs;
    }
    fmt::print("{}\n", object.dump());
  }
}

void measure(bool json) {
  init_process_group({.rank = 0, .world_size = 1});
  const auto plain = plain_operands();
  const auto dtensors = dtensor_operands();
  for (const auto& op : dispatch_ops()) {
    register_benchmark("dtensor", op, dtensors);
    if (!op.dtensor_only) {
      register_benchmark("plain", op, plain);
    }
  }
  Fastest reporter(json);
  benchmark::RunSpecifiedBenchmarks(&reporter);
  print_results(reporter.microseconds, json);
  destroy_process_group();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  bool json = false;
  std::vector<char*> rest;
  for (int i = 0; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) {
      json = true;
    } else {
      rest.push_back(argv[i]);
    }
  }
  int count = static_cast<int>(rest.size());
  benchmark::Initialize(&count, rest.data());
  if (benchmark::ReportUnrecognizedArguments(count, rest.data())) {
    return 1;
  }
  tessera::measure(json);
  return 0;
}
