// Calls of PyTorch's operator database, recorded here and replayed on DTensors. opdb_replay runs more of them.

#include <fmt/format.h>

#include "testing/peer_python.h"
#include "testing/temp_folder.h"
#include "tests/dtensor/opdb_runner.h"
#include "third_party/catch2/catch.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

/// What is wrong, a line each; an op that refuses is, too, as none does today.
std::string failures(const std::string& corpus, int num_ranks) {
  std::string lines;
  for (const auto& [overload, cases] : by_overload(read_opdb(corpus))) {
    for (const auto& run : run_overload(cases, {.count = num_ranks}).runs) {
      if (run.judgement.outcome != Outcome::Ok) {
        lines += fmt::format("{}: {}: {}\n", run.label, name_of(run.judgement.outcome), run.judgement.reason);
      }
    }
  }
  return lines;
}

void check(const std::string& sizes, int num_ranks) {
  const TempFolder folder;
  const auto corpus = folder.path("corpus.pt");
  const auto arguments = fmt::format("{} --per-overload 3 --samples 30 --sizes {}", corpus, sizes);
  if (!run_peer_python("expecttest, numpy, torch", "tests/dtensor/record_opdb.py", arguments)) {
    return;
  }
  CHECK(by_overload(read_opdb(corpus)).size() > 500);
  INFO("record_opdb.py " << arguments << ", on " << num_ranks << " ranks");
  CHECK_THAT(failures(corpus, num_ranks), Catch::Equals(""));
}

}  // namespace

TEST_CASE("calls of PyTorch's operator database", "[dtensor][ops]") {
  check("5 10 20", 2);
}

TEST_CASE("the same with sizes that leave shards empty", "[dtensor][ops]") {
  check("1 2 3", 3);
}
