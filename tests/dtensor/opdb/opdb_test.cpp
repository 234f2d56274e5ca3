// Calls of PyTorch's operator database, recorded here and replayed on DTensors. opdb_replay runs more of them.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "testing/peer_python.h"
#include "testing/temp_folder.h"
#include "tests/dtensor/opdb/opdb_runner.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// What is wrong, a line each; an op that refuses is, too, as none does today.
std::string failures(const std::string& corpus, const OpdbRanks& ranks, int draws) {
  std::string lines;
  for (const auto& run : run_cases(read_opdb(corpus), ranks, draws)) {
    if (run.judgement.outcome != Outcome::Ok) {
      lines += fmt::format("{}: {}: {}\n", run.label, name_of(run.judgement.outcome), run.judgement.reason);
    }
  }
  return lines;
}

void check_recorded_calls(const std::string& options, const OpdbRanks& ranks, int draws = 0) {
  const TempFolder folder;
  const auto corpus = folder.path("corpus.pt");
  const auto arguments = fmt::format("{} --per-overload 3 --samples 12 {}", corpus, options);
  if (!run_peer_python("expecttest, numpy, torch", "tests/dtensor/opdb/record_opdb.py", arguments)) {
    return;
  }
  CHECK(by_overload(read_opdb(corpus)).size() > 400);
  INFO("record_opdb.py " << arguments << ", on a mesh of " << fmt::format("{}", fmt::join(ranks.mesh, "x")));
  CHECK_THAT(failures(corpus, ranks, draws), Catch::Equals(""));
}

}  // namespace

TEST_CASE("calls of PyTorch's operator database", "[dtensor][ops]") {
  check_recorded_calls("", {.mesh = {2}});
}

TEST_CASE("calls of PyTorch's operator database with empty shards", "[dtensor][ops]") {
  check_recorded_calls("--sizes 1 2 3", {.mesh = {3}});
}

TEST_CASE("calls of PyTorch's operator database on two axes, in other dtypes and placements", "[dtensor][ops]") {
  check_recorded_calls("--sizes 2 3 5 --dtypes bfloat16 int32 complex64", {.mesh = {2, 2}}, /*draws=*/2);
}

}  // namespace tessera::testing
