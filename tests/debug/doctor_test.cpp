#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/collectives.h"
#include "comm/context/flight_record.h"
#include "comm/point_to_point.h"
#include "testing/expect.h"
#include "testing/peer_python.h"
#include "testing/run_processes.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr auto kTimeout = std::chrono::milliseconds(300);

/// Three calls that all ranks make.
void run_healthy_steps() {
  const FlightLabel label("blocks.0");
  for (int step = 0; step < 3; ++step) {
    all_reduce(at::ones({4}), ReduceOp::Sum, default_group());
  }
}

void gather(int64_t numel, at::ScalarType dtype = at::kFloat) {
  const FlightLabel label("blocks.1");
  all_gather(at::empty({3 * numel}, dtype), at::ones({numel}, dtype), default_group());
}

void hang() {
  std::this_thread::sleep_for(5 * kTimeout / 2);
}

/// Collectives in flight together: which, and in which order.
void run_together(const std::vector<Collective>& kinds) {
  std::vector<Pending> pending;
  const auto input = at::ones({4}), output = at::empty({12}), reduced = at::ones({4});
  for (const auto kind : kinds) {
    pending.push_back(kind == Collective::AllGather ? all_gather_async(output, input, default_group())
                                                    : all_reduce_async(reduced, ReduceOp::Sum, default_group()));
  }
  for (auto& one : pending) {
    one.wait();
  }
}

ProcessGroupPtr make_pair(const std::vector<int64_t>& ranks, int rank) {
  return rank == ranks[0] || rank == ranks[1] ? new_group(ranks, "pair") : ProcessGroupPtr();
}

struct Fault {
  const char* name;
  std::function<void(int rank)> body;  // of three ranks, after three healthy calls
  std::vector<std::string> verdict;    // parts of it
};

std::vector<Fault> faults() {
  using enum Collective;
  return {
      {"a rank hangs",
       [](int rank) { rank == 1 ? hang() : gather(4); },
       {"rank 1 has not come to all_gather #4 of group 'default' (Float[4] to Float[12]) for 'blocks.1'", "hangs",
        "It left its last one", "all_reduce #3 of group 'default' (Sum, Float[4]) for 'blocks.0'"}},
      {"a rank throws",
       [](int rank) {
         if (rank == 2) {
           throw std::runtime_error("a user's fault");
         }
         gather(4);
       },
       {"rank 2 has not come to all_gather #4", "died"}},
      {"a rank is slow",
       [](int rank) {
         if (rank == 1) {
           hang();
         }
         gather(4);
       },
       {"rank 1 is slow: it came to all_gather #4 of group 'default'", "s after the first"}},
      {"another collective",
       [](int rank) { rank == 1 ? all_reduce(at::ones({4}), ReduceOp::Sum, default_group()) : gather(4); },
       {"rank 1 makes another collective: it calls all_reduce #4 of group 'default'", "rank 0 calls all_gather #4"}},
      {"a collective is left out",
       [](int rank) {
         run_together(rank == 2 ? std::vector{AllReduce} : std::vector{AllGather, AllReduce});
       },
       {"rank 2 leaves out a collective: it calls all_reduce #4", "rank 0 calls all_gather #4"}},
      {"a collective too many",
       [](int rank) {
         run_together(rank == 2 ? std::vector{AllGather, AllReduce} : std::vector{AllReduce});
       },
       {"rank 2 makes a collective too many: it calls all_gather #4", "rank 0 calls all_reduce #4"}},
      {"another order",
       [](int rank) {
         run_together(rank == 0 ? std::vector{AllReduce, AllGather} : std::vector{AllGather, AllReduce});
       },
       {"rank 0 makes its calls in another order: it calls all_reduce #4", "rank 1 calls all_gather #4"}},
      {"another size",
       [](int rank) { gather(rank == 1 ? 5 : 4); },
       {"rank 1 uses another size: it calls all_gather #4", "Float[5] to Float[15]", "Float[4] to Float[12]"}},
      {"three sizes of three ranks",
       [](int rank) { gather(4 + rank); },
       {"rank 0 or rank 1 uses another size: it calls all_gather #4", "Float[4] to Float[12]",
        "Float[5] to Float[15]"}},
      {"another dtype",
       [](int rank) { gather(4, rank == 1 ? at::kBFloat16 : at::kFloat); },
       {"rank 1 uses another dtype: it calls all_gather #4", "BFloat16[4]"}},
      {"another operation",
       [](int rank) { all_reduce(at::ones({4}), rank == 1 ? ReduceOp::Max : ReduceOp::Sum, default_group()); },
       {"rank 1 gives another operation or source: it calls all_reduce #4", "(Max, Float[4])"}},
      {"another source",
       [](int rank) { broadcast(at::ones({4}), rank == 2 ? 1 : 0, default_group()); },
       {"rank 2 gives another operation or source: it calls broadcast #4"}},
      {"a rank hangs at the end of a chain of groups",
       [](int rank) {
         const auto pair = make_pair({1, 2}, rank);
         rank == 0 ? gather(4) : rank == 1 ? barrier(pair) : hang();
       },
       {"rank 2 has not come to all_gather #4", "in which rank 0 waits"}},
      {"two ranks wait for each other in two groups",
       [](int rank) {
         const auto pair = make_pair({0, 1}, rank);
         rank == 1 ? barrier(pair) : barrier(default_group());
       },
       {"these wait for each other: rank ", "rank 1 waits in barrier #1 of group 'pair'",
        "waits in barrier #4 of group 'default'"}},
      {"a message that nobody sends",
       [](int rank) { rank == 0 ? recv(at::empty({4}), 2, default_group()) : hang(); },
       {"rank 2 has not come to recv with peer 2 of group 'default' (Float[4])", "in which rank 0 waits"}},
  };
}

/// The first line of tools/doctor; "" without Python.
std::string verdict(const std::string& flights, const TempFolder& folder) {
  const auto output = folder.path("verdict");
  if (!run_peer_python("sys", "tools/doctor", flights + " > " + output)) {
    return "";
  }
  const auto text = read_file(output);
  return text.substr(0, text.find('\n'));
}

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("tools/doctor names the rank and the cause of each fault") {
  const TempFolder folder;
  for (const auto& fault : faults()) {
    DYNAMIC_SECTION(fault.name) {
      const TempFolder flights;
      setenv(kFlightVariable, flights.path().c_str(), /*replace=*/1);
      const auto run = [&](int rank) {
        run_healthy_steps();
        fault.body(rank);
      };
      CHECK_THROWS(run_ranks(3, run, {.timeout = kTimeout}));
      unsetenv(kFlightVariable);
      if (const auto text = verdict(flights.path(), folder); !text.empty()) {
        expect_parts(text, fault.verdict);
      }
    }
  }
}

namespace {

/// Three ranks as processes, which make four healthy calls (the first is run_processes' own) and then a fault.
void expect_verdict_of_processes(const std::string& backend, const std::function<void(int rank)>& fault,
                                 const std::vector<std::string>& parts) {
  const TempFolder flights, output;
  const auto result = try_run_processes(
      3,
      [&](int rank) {
        run_healthy_steps();
        fault(rank);
      },
      {.backend = backend, .timeout = std::chrono::seconds(2), .environment = {{kFlightVariable, flights.path()}}});
  CHECK(result.exit_code != 0);
  if (const auto text = verdict(flights.path(), output); !text.empty()) {
    expect_parts(text, parts);
  }
}

void die_on_rank_1(int rank) {
  if (rank == 1) {
    std::raise(SIGKILL);
  }
  gather(4);
}

const std::vector<std::string> kDeadRank = {
    "rank 1 was killed by signal 9 (Killed); rank ",
    "waits in all_gather #5 of group 'default' (Float[4] to Float[12]) for 'blocks.1'"};

void throw_on_rank_0(int rank) {
  if (rank == 0) {
    throw std::runtime_error("a user's fault");
  }
  gather(4);
}

void use_double_on_rank_2(int rank) {
  gather(4, rank == 2 ? at::kDouble : at::kFloat);
}

const std::vector<std::string> kOtherDtype = {"rank 2 uses another dtype: it calls all_gather #5", "Double[4]"};

}  // namespace

TEST_CASE("tools/doctor names a killed rank over shm") {
  expect_verdict_of_processes("shm", die_on_rank_1, kDeadRank);
}

TEST_CASE("tools/doctor names a killed rank over gloo") {
  expect_verdict_of_processes("gloo", die_on_rank_1, kDeadRank);
}

TEST_CASE("tools/doctor names a rank that threw over shm") {
  expect_verdict_of_processes("shm", throw_on_rank_0, {"rank 0 ended with exit code 1; rank ", "for 'blocks.1'"});
}

TEST_CASE("tools/doctor names a rank with another dtype over shm") {
  expect_verdict_of_processes("shm", use_double_on_rank_2, kOtherDtype);
}

TEST_CASE("tools/doctor names a rank with another dtype over gloo") {
  expect_verdict_of_processes("gloo", use_double_on_rank_2, kOtherDtype);
}

TEST_CASE("tools/doctor names a rank that keeps the others waiting in a run without a failure, over gloo") {
  const TempFolder flights, output;
  const auto result = try_run_processes(
      3,
      [&](int rank) {
        for (int step = 0; step < 24; ++step) {
          std::this_thread::sleep_for(std::chrono::milliseconds(rank == 1 ? 30 : 2));
          gather(4);
        }
      },
      {.backend = "gloo", .timeout = std::chrono::seconds(5), .environment = {{kFlightVariable, flights.path()}}});
  CHECK(result.exit_code == 0);
  if (const auto text = verdict(flights.path(), output); !text.empty()) {
    expect_parts(text, {"rank 1 is slow: it came last to ", " collectives, and the others waited for it in "});
  }
}

TEST_CASE("tools/doctor names a rank that hangs over shm") {
  const auto hang_on_rank_0 = [](int rank) {
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::seconds(20));  // the launcher ends it
    }
    gather(4);
  };
  expect_verdict_of_processes("shm", hang_on_rank_0, {"rank 0 has not come to all_gather #5"});
}

}  // namespace tessera::testing
