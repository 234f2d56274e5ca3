#include "testing/run_processes.h"

#include "base/error.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;

TEST_CASE("run_processes, with [a] name that Catch2 must not take for tags") {
  run_processes(2, [](int rank) {
    expect_equal(get_rank(), rank);
    expect_equal(get_world_size(), 2);
  });
}

TEST_CASE("run_processes reports the rank that failed and what it wrote") {
  const auto fail_on_rank_1 = [](int rank) { TESSERA_CHECK(ValueError, rank != 1, "a text of rank 1"); };
  CHECK_THROWS_WITH(run_processes(2, fail_on_rank_1),
                    ContainsSubstring("ended with exit code 1") && ContainsSubstring("--- rank 1\na text of rank 1"));
}

TEST_CASE("each call of run_processes runs its own body, also in sections") {
  run_processes(1, [](int) {});
  SECTION("one") {
    CHECK_THROWS_WITH(run_processes(1, [](int) { throw Error("first"); }), ContainsSubstring("first"));
  }
  SECTION("two") {
    CHECK_THROWS_WITH(run_processes(1, [](int) { throw Error("second"); }), ContainsSubstring("second"));
  }
}

}  // namespace
}  // namespace tessera
