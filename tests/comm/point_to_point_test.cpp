// Messages between ranks that are threads, and over the "fake" backend. Ranks as processes:
// process_point_to_point_test.cpp.

#include "comm/point_to_point.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <future>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/context/rank_context.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/comm/cases/point_to_point_cases.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

using std::chrono::milliseconds;

TEST_CASE("messages between all ranks, of every dtype and size") {
  for (const int world_size : {2, 3, 4}) {
    run_ranks(world_size, [](int) { check_messages(/*largest=*/10001); });
  }
}

TEST_CASE("two ranks send to each other at once, 20 MiB each") {
  run_ranks(2, [](int) { check_exchange(5 * 1024 * 1024); });
  run_ranks(4, [](int) { check_exchange(1000); });
}

TEST_CASE("messages in rings, in flight, beside collectives and other groups") {
  for (const int world_size : {2, 3, 4}) {
    run_ranks(world_size, [](int) {
      check_ring();
      check_many_in_flight();
      check_dropped_messages();
      check_order_is_free();
      check_c10d();
    });
  }
  run_ranks(4, [](int) { check_sub_group(); });
}

TEST_CASE("ends of a message that differ are an error on both, which says what each did") {
  run_ranks(2, [](int rank) {
    const ProcessGroupPtr pair = new_group({1, 0}, "pair");
    const auto call = [&] { rank == 1 ? send(at::zeros({4}), 1, pair) : recv(at::zeros({5}), 0, pair, 8); };
    expect_throws<CommError>(call, "on group 'pair' (rank");
    expect_throws<CommError>(call,
                             "what is sent is not what is received: rank 0: send(to rank 1, tag 0, Float[4]); "
                             "rank 1: recv(from rank 0, tag 8, Float[5])");
  });
}

TEST_CASE("peers and tensors that do not fit are refused before anything is sent") {
  run_ranks(3, [](int rank) {
    if (rank != 2) {
      check_refusals();
    }
  });
}

TEST_CASE("a peer that ends without its end of a message is named; messages between others go on") {
  run_ranks(3, [](int rank) {
    if (rank == 2) {
      return;
    }
    const at::Tensor tensor = at::full({2}, 1.f + rank);
    expect_throws<CommError>([&] { recv(tensor, 2, default_group(), 4); },
                             "recv(from rank 2, tag 4, Float[2]) on group 'default' (rank " + std::to_string(rank) +
                                 " of ranks [0, 1, 2]): rank(s) [2] have ended without calling it");
    expect_throws<CommError>([&] { send(tensor, 2, default_group()); }, "rank(s) [2] have ended without calling it");
    rank == 0 ? send(tensor, 1, default_group()) : recv(tensor, 0, default_group());
    expect_equal(tensor[1].item<float>(), 1.f);
  });
}

TEST_CASE("a rank that throws wakes those that wait for its messages") {
  const auto body = [](int rank) {
    if (rank == 0) {
      throw ValueError("no good");
    }
    expect_throws<CommError>([] { recv(at::zeros({2}), 0, default_group()); }, "rank 0 failed: no good");
  };
  CHECK_THROWS_WITH(run_ranks(3, body), "rank 0: no good");
}

TEST_CASE("a message that does not come in time: the peer is named, and learns of it") {
  std::promise<void> timed_out;
  const auto body = [&](int rank) {
    if (rank == 0) {
      expect_throws<CommError>([] { send(at::zeros({2}), 1, default_group()); },
                               "rank(s) [1] did not arrive within 50 ms");
      timed_out.set_value();
    } else {
      timed_out.get_future().wait();
      expect_throws<CommError>([] { recv(at::zeros({2}), 0, default_group()); },
                               "rank 0 failed: send(to rank 1, tag 0, Float[2]) on group 'default'");
    }
  };
  run_ranks(2, body, {.timeout = milliseconds(50)});
}

TEST_CASE("fake: a send does nothing, and a recv leaves the tensor as it is") {
  const RankContextGuard guard{RankContext::create()};
  init_process_group({.backend = "fake", .rank = 2, .world_size = 8});
  const at::Tensor tensor = at::full({3}, 5.f);
  send(tensor, 7, default_group());
  recv(tensor, 0, default_group());
  CHECK(tensor.equal(at::full({3}, 5.f)));
  CHECK(comm_stats()[Collective::Send].calls == 1);
  CHECK(comm_stats()[Collective::Send].bytes_sent == 12);
  CHECK(comm_stats()[Collective::Recv].calls == 1);
  CHECK(name(Collective::Send) == "send");
  CHECK(name(Collective::Recv) == "recv");
  CHECK_THROWS_AS(send(tensor, 2, default_group()), ValueError);
}

}  // namespace
}  // namespace tessera::testing
