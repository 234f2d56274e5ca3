// Calls of PyTorch's operator database, recorded here and replayed on DTensors. opdb_replay runs more of them.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <numeric>

#include "testing/peer_python.h"
#include "testing/temp_folder.h"
#include "tests/dtensor/opdb/opdb_runner.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// What is wrong, a line each; an op that refuses is, too, as none does today.
std::string failures(const std::vector<OpdbRun>& runs) {
  std::string lines;
  for (const auto& run : runs) {
    if (run.judgement.outcome != Outcome::Ok) {
      lines += fmt::format("{}: {}: {}\n", run.label, name_of(run.judgement.outcome), run.judgement.reason);
    }
  }
  return lines;
}

/// The share of elements whose bounds depend on the largest one.
double share_by_largest(const std::vector<OpdbRun>& runs) {
  int64_t by_largest = 0, all = 0;
  for (const auto& run : runs) {
    by_largest += run.elements[static_cast<size_t>(BoundSource::LargestElement)];
    all = std::accumulate(run.elements.begin(), run.elements.end(), all);
  }
  return static_cast<double>(by_largest) / static_cast<double>(all);
}

/// Of numbers of 16 bits, of which kRoundingErrors are several percent.
constexpr double kMaxShareOf16Bits = 0.15;

void check_recorded_calls(const std::string& options, const OpdbRanks& ranks, int draws = 0,
                          double max_share_by_largest = 0.005) {
  const TempFolder folder;
  const auto corpus = folder.path("corpus.pt");
  const auto arguments = fmt::format("{} --per-overload 3 --samples 12 {}", corpus, options);
  if (!run_peer_python("expecttest, numpy, torch", "tests/dtensor/opdb/record_opdb.py", arguments)) {
    return;
  }
  CHECK(by_overload(read_opdb(corpus)).size() > 400);
  INFO("record_opdb.py " << arguments << ", on a mesh of " << fmt::format("{}", fmt::join(ranks.mesh, "x")));
  const auto runs = run_cases(read_opdb(corpus), ranks, draws);
  CHECK_THAT(failures(runs), Catch::Equals(""));
  CHECK(share_by_largest(runs) < max_share_by_largest);
}

}  // namespace

TEST_CASE("calls of PyTorch's operator database", "[dtensor][ops]") {
  check_recorded_calls("", {.mesh = {2}});
}

TEST_CASE("calls of PyTorch's operator database with empty shards", "[dtensor][ops]") {
  check_recorded_calls("--sizes 1 2 3", {.mesh = {3}});
}

TEST_CASE("calls of PyTorch's operator database on two axes, in other dtypes and placements", "[dtensor][ops]") {
  check_recorded_calls("--sizes 2 3 5 --dtypes bfloat16 int32 complex64", {.mesh = {2, 2}}, /*draws=*/2,
                       kMaxShareOf16Bits);
}

}  // namespace tessera::testing
