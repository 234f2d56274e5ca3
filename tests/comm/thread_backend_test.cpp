#include "comm/threads/thread_backend.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/context/rank_context.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;
using std::chrono::milliseconds;

TEST_CASE("ranks that call different collectives all learn what each of them called") {
  run_ranks(3, [](int rank) {
    const auto differ = [&] {
      at::Tensor tensor = at::zeros({4});
      if (rank == 1) {
        broadcast(tensor, 0, default_group());
      } else {
        all_reduce(tensor, ReduceOp::Sum, default_group());
      }
    };
    expect_throws<CommError>(differ,
                             "rank 0: all_reduce(Sum, Float[4]); rank 1: broadcast(source 0, Float[4]); rank 2");
    barrier(default_group());
  });
}

TEST_CASE("sizes, dtypes, operations, sources and splits that differ between ranks") {
  run_ranks(2, [](int rank) {
    const ProcessGroupPtr& group = default_group();
    expect_throws<CommError>([&] { all_reduce(at::zeros({4 + rank}), ReduceOp::Sum, group); },
                             "rank 1: all_reduce(Sum, Float[5])");
    const at::ScalarType dtype = rank == 0 ? at::kFloat : at::kInt;
    expect_throws<CommError>([&] { all_reduce(at::zeros({4}, dtype), ReduceOp::Sum, group); }, "Int[4]");
    const ReduceOp op = rank == 0 ? ReduceOp::Sum : ReduceOp::Max;
    expect_throws<CommError>([&] { all_reduce(at::zeros({4}), op, group); }, "all_reduce(Max, Float[4])");
    expect_throws<CommError>([&] { broadcast(at::zeros({4}), rank, group); }, "broadcast(source 1, Float[4])");
    const at::Tensor three = at::zeros({3});
    const std::vector<int64_t> splits = {1, 2};
    expect_throws<CommError>([&] { all_to_all(at::zeros({3}), three, splits, splits, group); },
                             "rank 0 sends 2 elements to rank 1, which expects 1");
    barrier(group);
  });
}

TEST_CASE("a rank that throws wakes the ranks that wait, and is named to them") {
  for (int failing = 0; failing < 3; ++failing) {
    std::array<std::string, 3> texts;
    const auto body = [&](int rank) {
      if (rank == failing) {
        throw ValueError("no good");
      }
      try {
        barrier(default_group());
      } catch (const CommError& error) {
        texts[rank] = error.what();
        throw;
      }
    };
    CHECK_THROWS_WITH(run_ranks(3, body), fmt::format("rank {}: no good", failing));
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != failing) {
        CHECK_THAT(texts[rank], ContainsSubstring(fmt::format("rank {} failed: no good", failing)));
      }
    }
  }
}

TEST_CASE("a rank that throws wakes ranks that wait in groups without it") {
  const auto body = [](int rank) {
    if (rank == 0) {
      throw ValueError("no good");
    }
    const ProcessGroupPtr others = new_group({1, 2}, "others");
    if (rank == 1) {
      barrier(others);
    } else {
      std::this_thread::sleep_for(milliseconds(20));
      barrier(default_group());
    }
  };
  CHECK_THROWS_WITH(run_ranks(3, body), "rank 0: no good");
}

TEST_CASE("a rank that returns early is named to the ranks that wait for it; the others go on") {
  const auto body = [](int rank) {
    if (rank == 2) {
      return;
    }
    const ProcessGroupPtr pair = new_group({0, 1}, "pair");
    barrier(pair);
    expect_throws<CommError>([] { barrier(default_group()); }, "rank(s) [2] have ended without calling it");
    barrier(pair);
  };
  run_ranks(3, body);
}

TEST_CASE("a time-out names the ranks that did not arrive, and fails them too") {
  std::promise<void> timed_out;
  const auto body = [&](int rank) {
    if (rank == 0) {
      expect_throws<CommError>([] { barrier(default_group()); }, "rank(s) [1] did not arrive within 50 ms");
      timed_out.set_value();
    } else {
      timed_out.get_future().wait();
      expect_throws<CommError>([] { barrier(default_group()); }, "rank 0 failed: barrier() on group 'default'");
    }
  };
  run_ranks(2, body, {.timeout = milliseconds(50)});
}

TEST_CASE("a time-out that is too long for the clock") {
  const auto body = [](int rank) {
    std::this_thread::sleep_for(milliseconds(rank == 1 ? 50 : 0));  // rank 0 waits meanwhile
    barrier(default_group());
  };
  run_ranks(2, body, {.timeout = milliseconds::max()});
}

TEST_CASE("a helper thread acts as the rank whose context it adopts") {
  run_ranks(2, [](int rank) {
    at::Tensor tensor = at::full({1}, 1.f + rank);
    const RankContext context = RankContext::current();
    std::thread helper([&] {
      TESSERA_EXPECT(!is_initialized());
      RankContextGuard guard(context);
      expect_equal(get_rank(), rank);
      all_reduce(tensor, ReduceOp::Sum, default_group());
    });
    helper.join();
    expect_equal(tensor.item<float>(), 3.f);
    TESSERA_EXPECT(RankContext::current() == context);
    TESSERA_EXPECT(comm_stats()[Collective::AllReduce].calls == 1);
  });
}

TEST_CASE("rank contexts have numbers of their own") {
  std::array<uint64_t, 3> ids{};
  run_ranks(3, [&](int rank) { ids[rank] = rank_context_id(); });
  CHECK(std::set<uint64_t>(ids.begin(), ids.end()).size() == 3);
  CHECK(std::find(ids.begin(), ids.end(), uint64_t{0}) == ids.end());
  CHECK(rank_context_id() == 0);
}

TEST_CASE("many collectives in a row, more ranks than cores") {
  run_ranks(8, [](int rank) {
    const ProcessGroupPtr half =
        new_group(rank < 4 ? std::vector<int64_t>{0, 1, 2, 3} : std::vector<int64_t>{4, 5, 6, 7});
    at::Tensor tensor = at::zeros({64});
    for (int step = 0; step < 100; ++step) {
      tensor.fill_(rank + step);
      all_reduce(tensor, ReduceOp::Sum, half);
      expect_equal(tensor[63].item<float>(), (rank < 4 ? 6.f : 22.f) + 4 * step);
      all_reduce(tensor, ReduceOp::Max, default_group());
      expect_equal(tensor[0].item<float>(), 22.f + 4 * step);
    }
  });
}

}  // namespace
}  // namespace tessera
