// The gloo backend with ranks as processes, against the threads backend: the same bits.

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "base/open_files.h"
#include "comm/collectives.h"
#include "comm/point_to_point.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "tests/comm/cases/differing_calls.h"
#include "tests/comm/cases/loopback_store.h"
#include "tests/comm/cases/process_backend_cases.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

TEST_CASE("gloo gives the same bits as threads, for every dtype") {
  for (const int world_size : {2, 3}) {
    check_same_bits_as_threads("gloo", world_size, reducible_dtypes(), {17});
  }
}

TEST_CASE("gloo gives the same bits as threads, for sizes from nothing to a piece") {
  check_same_bits_as_threads("gloo", 4, {c10::kFloat}, {0, 1, 1000, 20011});
}

TEST_CASE("gloo gives the same bits as threads, for tensors that are reduced in pieces") {
  check_same_bits_as_threads("gloo", 2, {c10::kFloat}, {262'145, 1'000'003});
  check_same_bits_as_threads("gloo", 3, {c10::kFloat}, {600'001});
}

TEST_CASE("sub-groups over gloo, made again and again") {
  check_sub_groups("gloo");
}

TEST_CASE("gloo: collectives in flight may be waited for in any order") {
  check_waits_in_any_order("gloo", 100000);
}

TEST_CASE("gloo: an all_reduce in pieces is launched without the others, and goes on without a wait") {
  const auto body = [](int rank) {
    at::Tensor tensor = at::full({100000}, float(rank)), word = at::zeros({1});
    Pending pending;
    if (rank == 0) {
      pending = all_reduce_async(tensor, ReduceOp::Sum, default_group());
      send(word, 1, default_group());
      send(word, 2, default_group());
      recv(word, 1, default_group());  // who has waited for the all_reduce
    } else {
      recv(word, 0, default_group());
      all_reduce(tensor, ReduceOp::Sum, default_group());
      if (rank == 1) {
        send(word, 0, default_group());
      }
    }
    pending.wait();
    TESSERA_EXPECT(tensor.equal(at::full({100000}, 3.f)));
  };
  run_processes(3, body, {.backend = "gloo", .timeout = std::chrono::seconds(20)});
}

TEST_CASE("gloo: hundreds of collectives of one and more rounds in flight") {
  const auto body = [](int rank) {
    std::vector<at::Tensor> sums, gathered;
    std::vector<Pending> pending;
    for (int i = 0; i < 140; ++i) {
      sums.push_back(at::full({20000}, float(rank + i)));
      gathered.push_back(at::zeros({3 * 20000}));
      pending.push_back(all_reduce_async(sums.back(), ReduceOp::Sum, default_group()));
      for (int j = 0; j < i % 3; ++j) {
        pending.push_back(all_gather_async(gathered.back(), at::full({20000}, float(rank * i)), default_group()));
      }
    }
    while (!pending.empty()) {
      pending.back().wait();
      pending.pop_back();
    }
    for (int i = 0; i < 140; ++i) {
      TESSERA_EXPECT(sums[i].equal(at::full({20000}, 3.f + 3 * i)));
      TESSERA_EXPECT(i % 3 == 0 || gathered[i].view({3, 20000}).select(0, 2).equal(at::full({20000}, 2.f * i)));
    }
  };
  run_processes(3, body, {.backend = "gloo", .timeout = std::chrono::seconds(60)});
}

TEST_CASE("gloo: when a group goes, its all_reduces in pieces fail at once, and works of one round go on") {
  const auto body = [](int rank) {
    ProcessGroupPtr group = new_group({0, 1, 2}, "brief");
    at::Tensor small = at::full({10}, float(rank));
    if (rank == 0) {
      const at::Tensor large = at::zeros({100000}), next = at::zeros({100000});
      Pending one_round = all_reduce_async(small, ReduceOp::Sum, group);
      Pending in_flight = all_reduce_async(large, ReduceOp::Sum, group);
      Pending queued = all_reduce_async(next, ReduceOp::Sum, group);
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // by then the group's thread waits for the peers
      const auto start = std::chrono::steady_clock::now();
      group.reset();
      expect_throws<CommError>([&] { in_flight.wait(); },
                               "all_reduce(Sum, Float[100000]) on group 'brief' (rank 0 of ranks [0, 1, 2]): the group "
                               "was destroyed");
      expect_throws<CommError>([&] { queued.wait(); }, "the group was destroyed");
      TESSERA_EXPECT(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
      barrier(default_group());  // for which the peers have waited
      one_round.wait();
      expect_equal(large.storage().use_count(), size_t{1});
    } else {
      barrier(default_group());
      all_reduce(small, ReduceOp::Sum, group);
    }
    TESSERA_EXPECT(small.equal(at::full({10}, 3.f)));
    barrier(default_group());  // until here the peers keep the group
  };
  run_processes(3, body, {.backend = "gloo", .timeout = std::chrono::seconds(60)});
}

TEST_CASE("gloo: c10d's own all_to_all of tensors that do not fit") {
  check_all_to_all_that_does_not_fit("gloo");
}

TEST_CASE("gloo: a collective that one rank never waits for") {
  check_dropped("gloo");
}

TEST_CASE("gloo: calls that do not belong together are an error on both ranks") {
  check_calls_that_differ("gloo");
}

TEST_CASE("gloo: where calls do not belong together the error shows both") {
  const auto body = [](int rank) {
    destroy_process_group();
    init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(1)});
    barrier(default_group());
    const auto call = [&] {
      rank == 0 ? all_reduce(at::zeros({4}), ReduceOp::Sum, default_group())
                : all_gather(at::zeros({16}), at::zeros({8}), default_group());
    };
    expect_throws<CommError>(
        call, rank == 0 ? "; rank 1 called all_gather(Float[8])" : "; rank 0 called all_reduce(Sum, Float[4])");
    destroy_process_group();
    init_process_group({.backend = "gloo"});
  };
  run_processes(2, body, {.backend = "gloo"});
}

/// One of three ranks dies, after `last_act`, before they make a group: the others learn by `message` which, soon.
void check_death_before_group(const std::string& backend, int victim, const std::function<void()>& last_act,
                              const std::function<std::string(int rank)>& message) {
  const auto body = [&](int rank) {
    signal(SIGTERM, SIG_IGN);
    barrier(default_group());
    if (rank == victim) {
      last_act();
      raise(SIGKILL);
    }
    const auto start = std::chrono::steady_clock::now();
    expect_throws<CommError>([] { new_group({0, 1, 2}, "late"); }, message(rank));
    TESSERA_EXPECT(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
    std::fprintf(stderr, "had the error\n");
    if (victim != 0) {
      end_together(rank);
    }
  };
  const ProcessesResult result = try_run_processes(3, body, {.backend = backend, .timeout = std::chrono::seconds(15)});
  for (int rank = 0; rank < 3; ++rank) {
    if (rank != victim) {
      CHECK_THAT(result.outputs.at(rank), Catch::Matchers::ContainsSubstring("had the error"));
    }
  }
}

std::string names_rank_2(int rank) {
  return fmt::format("connecting the ranks on group 'late' (rank {} of ranks [0, 1, 2]): rank 2 (pid ", rank);
}

TEST_CASE("gloo: a rank that dies before a group is made: the other members learn which, soon") {
  check_death_before_group(
      "gloo", 2, [] {}, names_rank_2);
}

TEST_CASE("gloo: a rank that dies while the others connect is named, soon") {
  const auto come_to_connect = [] { connect_beside()->set("1/late[0,1,2]/0/here/2", std::string()); };
  check_death_before_group("gloo", 2, come_to_connect, names_rank_2);
}

TEST_CASE("a rank 0 that dies before a group is made is named by the other members, soon") {
  const std::string backend = GENERATE("gloo", "shm");
  const auto message = [](int) { return std::string("rank 0, which serves the store at 127.0.0.1:"); };
  check_death_before_group(
      backend, 0, [] {}, message);
}

TEST_CASE("gloo: a peer that dies in a collective: the others get an error with group and collective, soon") {
  check_peer_that_dies("gloo", "all_reduce(Sum, Float[100000]) on group 'default'", std::chrono::seconds(20));
}

TEST_CASE("gloo: a peer that dies is noticed while a program that it has started goes on") {
  const auto body = [](int rank) {
    signal(SIGTERM, SIG_IGN);
    barrier(default_group());
    if (rank == 1) {
      expect_equal(std::system("sleep 30 </dev/null >/dev/null 2>&1 &"), 0);
      raise(SIGKILL);
    }
    const auto start = std::chrono::steady_clock::now();
    expect_throws<CommError>([] { all_reduce(at::zeros({4}), ReduceOp::Sum, default_group()); },
                             "rank(s) [1] have died");
    TESSERA_EXPECT(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
    std::fprintf(stderr, "had the error\n");
  };
  const ProcessesResult result = try_run_processes(2, body, {.backend = "gloo", .timeout = std::chrono::seconds(15)});
  CHECK_THAT(result.outputs.at(0), Catch::Matchers::ContainsSubstring("had the error"));
}

TEST_CASE("gloo: what a group opens is closed in the programs that a rank starts") {
  const auto before = open_files();  // in the ranks, too
  run_processes(2, [&](int) {
    const ProcessGroupPtr group = new_group({0, 1}, "pair");
    barrier(group);
    int sockets = 0;
    for (const auto& [number, what] : opened_since(before)) {
      sockets += what.starts_with("socket:");
      const bool is_kept = (fcntl(number, F_GETFD) & FD_CLOEXEC) == 0;
      expect_equal(is_kept ? what : std::string(), std::string());
    }
    TESSERA_EXPECT(sockets >= 4);  // one that listens and one to the peer, for each of two groups
  });
}

void on_broken_pipe(int) {}

TEST_CASE("gloo: a connection to a peer that has died does not end a rank by a signal; a program's handler stays") {
  const bool has_handler = GENERATE(false, true);
  const auto before = std::signal(SIGPIPE, has_handler ? on_broken_pipe : SIG_DFL);  // in the ranks, too
  run_processes(2, [&](int) {
    const auto during = std::signal(SIGPIPE, SIG_IGN);
    TESSERA_EXPECT(during == (has_handler ? on_broken_pipe : SIG_IGN));
  });
  std::signal(SIGPIPE, before);
}

TEST_CASE("gloo: a peer that does not come: the time-out is an error with group and collective") {
  check_peer_that_does_not_come("gloo");
}

TEST_CASE("gloo: a time-out that is too long for the clock") {
  check_longest_time_out("gloo");
}

}  // namespace
}  // namespace tessera::testing
