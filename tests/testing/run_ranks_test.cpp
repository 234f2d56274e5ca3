#include "testing/run_ranks.h"

#include <ATen/ops/randn.h>
#include <c10/core/AutogradState.h>

#include <atomic>
#include <stdexcept>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;

TEST_CASE("run_ranks runs each rank once with a default group of its own") {
  for (const int world_size : {1, 2, 3, 4}) {
    std::atomic<int> ranks{0};
    run_ranks(world_size, [&](int rank) {
      expect_equal(get_rank(), rank);
      expect_equal(get_world_size(), world_size);
      expect_equal(group_name(default_group()), std::string("default"));
      ranks += 1 << rank;
    });
    CHECK(ranks == (1 << world_size) - 1);
    CHECK_FALSE(is_initialized());
  }
}

TEST_CASE("run_ranks has backward run in the ranks' threads, and leaves other threads as they are") {
  const auto has_device_threads = [] { return c10::AutogradState::get_tls_state().get_multithreading_enabled(); };
  run_ranks(2, [&](int) { TESSERA_EXPECT(!has_device_threads()); });
  CHECK(has_device_threads());
}

TEST_CASE("run_ranks rethrows the first failure with its rank and type and wakes the others") {
  const auto fail_on_rank_1 = [](const auto& failure) {
    run_ranks(3, [&](int rank) {
      if (rank == 1) {
        throw failure;
      }
      barrier(default_group());
    });
  };
  CHECK_THROWS_AS(fail_on_rank_1(ValueError("bad value")), ValueError);
  CHECK_THROWS_AS(fail_on_rank_1(KeyError("bad key")), KeyError);
  CHECK_THROWS_AS(fail_on_rank_1(StateError("bad time")), StateError);
  CHECK_THROWS_AS(fail_on_rank_1(NotImplementedError("not there")), NotImplementedError);
  CHECK_THROWS_AS(fail_on_rank_1(AssertionError("broken")), AssertionError);
  CHECK_THROWS_WITH(fail_on_rank_1(std::runtime_error("other")), "rank 1: other");
  CHECK_THROWS_WITH(fail_on_rank_1(7), ContainsSubstring("rank 1: an exception that is no std::exception"));
}

TEST_CASE("a failing expectation names its place, its values and its rank") {
  const auto body = [](int rank) {
    if (rank == 0) {
      expect_equal(1 + 1, 3);
    }
  };
  CHECK_THROWS_AS(run_ranks(2, body), ExpectationError);
  CHECK_THROWS_WITH(run_ranks(2, body), ContainsSubstring("rank 0: ") && ContainsSubstring("run_ranks_test.cpp") &&
                                            ContainsSubstring("is 2, expected 3"));
  CHECK_THROWS_WITH([] { TESSERA_EXPECT(1 > 2); }(), ContainsSubstring("does not hold: 1 > 2"));
  CHECK_THROWS_AS(expect_throws<ValueError>([] {}, "x"), ExpectationError);
  CHECK_THROWS_AS(expect_throws<ValueError>([] { throw ValueError("abc"); }, "x"), ExpectationError);
  CHECK_NOTHROW(expect_throws<ValueError>([] { throw ValueError("abc"); }, "bc"));
}

TEST_CASE("run_ranks refuses a world without ranks") {
  CHECK_THROWS_AS(run_ranks(0, [](int) {}), ValueError);
}

TEST_CASE("make_generator gives the same numbers on every rank") {
  const at::Tensor expected = at::randn({16}, make_generator(5));
  run_ranks(4, [&](int) { TESSERA_EXPECT(at::randn({16}, make_generator(5)).equal(expected)); });
  CHECK_FALSE(at::randn({16}, make_generator(6)).equal(expected));
}

}  // namespace
}  // namespace tessera
