// Replays a corpus of recorded ATen calls (opdb_corpus.h) on DTensors:
//
//   $(./bazelw info output_base)/external/peer_python/python tests/dtensor/opdb/record_opdb.py corpus.pt
//   ./bazelw run //tests/dtensor:opdb_replay -- $PWD/corpus.pt --mesh 2 3 --report $PWD/docs/generated/op_coverage.md
//   ./bazelw run //tests/dtensor:opdb_replay -- $PWD/corpus.pt --mesh 3 2x2 --draws 8
//   ./bazelw run --config=cuda //tests/dtensor:opdb_replay -- $PWD/corpus.pt --cuda          ranks share the GPU
//
// Ends with 0 if no run was wrong, diverged or crashed.

#include <c10/util/Logging.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>

#include "tests/dtensor/opdb/opdb_report.h"

namespace tessera {
namespace {

struct Options {
  std::string corpus;
  std::vector<std::string> meshes{"2"};
  int draws = 0;
  std::string report;
  std::string only;
  bool verbose = false;
  bool cuda = false;
};

bool is_taken(const Options& options, const std::string& overload) {
  return options.only.empty() || overload == options.only || overload == "aten::" + options.only;
}

std::map<std::string, std::vector<OpdbCase>> cases_by_overload(const Options& options) {
  auto cases = by_overload(read_opdb(options.corpus));
  std::erase_if(cases, [&](const auto& overload) { return !is_taken(options, overload.first); });
  return cases;
}

/// {2, 3} of "2x3".
std::vector<int64_t> shape_of(const std::string& mesh) {
  std::vector<int64_t> shape;
  std::istringstream sizes(mesh);
  for (std::string size; std::getline(sizes, size, 'x');) {
    shape.push_back(std::stoll(size));
  }
  return shape;
}

void print_failures(const std::string& mesh, const OverloadResult& overload, bool verbose) {
  for (const auto& run : overload.runs) {
    const auto outcome = run.judgement.outcome;
    if (outcome != Outcome::Ok && (verbose || outcome != Outcome::Unsupported)) {
      fmt::print("mesh {}, {}: {}: {}\n", mesh, run.label, name_of(outcome), run.judgement.reason);
    }
  }
  if (!overload.is_full()) {
    fmt::print("mesh {}, {}: {} of {} runs ok\n", mesh, overload.overload, overload.count(Outcome::Ok),
               overload.runs.size());
  }
  std::fflush(stdout);
}

/// The results of some overloads. One child process runs them all: on a GPU it takes a while to begin.
std::vector<OverloadResult> run_together(const std::vector<std::vector<OpdbCase>>& overloads, const OpdbRanks& ranks,
                                         int draws) {
  std::vector<OverloadResult> results;
  std::vector<OpdbCase> all;
  std::map<std::string, size_t> result_of;  // by the id of a case
  for (const auto& cases : overloads) {
    for (const auto& test : cases) {
      result_of[test.id] = results.size();
      all.push_back(test);
    }
    results.push_back({.overload = cases.at(0).overload(), .runs = {}});
  }
  for (auto& run : run_cases(all, ranks, draws)) {
    auto& result = results[result_of.at(run.label.substr(0, run.label.find(' ')))];
    result.runs.push_back(std::move(run));
  }
  return results;
}

/// Prints what failed as it comes.
std::vector<OverloadResult> replay_on(const std::string& mesh,
                                      const std::map<std::string, std::vector<OpdbCase>>& cases,
                                      const Options& options) {
  const OpdbRanks ranks{
      .mesh = shape_of(mesh), .device = options.cuda ? c10::kCUDA : c10::kCPU, .expects_recorded = !options.cuda};
  const size_t together = options.cuda ? 50 : 1;
  std::vector<OverloadResult> results;
  std::vector<std::vector<OpdbCase>> next;
  for (const auto& [overload, list] : cases) {
    next.push_back(list);
    if (next.size() < together && overload != cases.rbegin()->first) {
      continue;
    }
    for (auto& result : run_together(next, ranks, options.draws)) {
      print_failures(mesh, result, options.verbose);
      results.push_back(std::move(result));
    }
    next.clear();
  }
  return results;
}

int replay(const Options& options) {
  const auto cases = cases_by_overload(options);
  std::vector<Replay> replays;
  bool any_wrong = false;
  for (const auto& mesh : options.meshes) {
    replays.push_back({.mesh = mesh, .overloads = replay_on(mesh, cases, options)});
    any_wrong = any_wrong || std::ranges::any_of(replays.back().overloads, &OverloadResult::is_wrong);
  }
  fmt::print("{}{}", summary_table(replays), bounds_summary(replays));
  if (!options.report.empty()) {
    std::ofstream(options.report) << coverage_report(replays);
  }
  return any_wrong ? 1 : 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::Options options;
  CLI::App app("Replays recorded ATen calls on DTensors and compares with the recorded results");
  app.add_option("corpus", options.corpus, "the corpus file")->required();
  app.add_option("--mesh", options.meshes, "shapes of the mesh, each a replay of its own")
      ->check([](const std::string& mesh) {
        return std::regex_match(mesh, std::regex("[1-9]\\d*(x[1-9]\\d*)*")) ? "" : "not a shape such as 2x3: " + mesh;
      });
  app.add_option("--draws", options.draws, "random assignments of placements a case, in place of the systematic ones")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--report", options.report, "where to write the coverage report (Markdown)");
  app.add_option("--only", options.only, "one overload, such as add.Tensor");
  app.add_flag("--verbose", options.verbose, "print unsupported runs too");
  app.add_flag("--cuda", options.cuda, "on GPU 0 (in a build with --config=cuda)");
  CLI11_PARSE(app, argc, argv);
  try {
    return tessera::replay(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "opdb_replay: {}\n", error.what());
    return 2;
  }
}
