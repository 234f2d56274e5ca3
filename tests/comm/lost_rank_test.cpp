// A rank that dies by SIGKILL, or fails as a thread, and what the others wait in then: each wait ends soon, and names
// the rank.

#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <signal.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/point_to_point.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "testing/run_ranks.h"
#include "tests/comm/cases/loopback_store.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

using Catch::Matchers::ContainsSubstring;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 3, kVictim = 1;
constexpr std::chrono::milliseconds kLife(300);  // of the victim, from when the others begin to wait

struct Call {
  const char* name;
  std::function<Pending(const ProcessGroupPtr&)> launch;
};

/// In which the victim takes no part.
std::vector<Call> calls() {
  const auto tensor = [](int64_t numel) { return at::zeros({numel}); };
  constexpr int64_t kFew = 6, kMany = 300'000;
  std::vector<Call> calls;
  for (const int64_t numel : {kFew, kMany}) {  // of gloo in one round and in pieces, of shm in one and in many slots
    calls.push_back({"all_reduce", [=](auto& group) { return all_reduce_async(tensor(numel), ReduceOp::Sum, group); }});
    calls.push_back(
        {"all_gather", [=](auto& group) { return all_gather_async(tensor(kRanks * numel), tensor(numel), group); }});
    calls.push_back({"reduce_scatter", [=](auto& group) {
                       return reduce_scatter_async(tensor(numel / kRanks), tensor(numel), ReduceOp::Sum, group);
                     }});
  }
  calls.push_back(
      {"all_to_all", [=](auto& group) { return all_to_all_async(tensor(kFew), tensor(kFew), {}, {}, group); }});
  calls.push_back({"broadcast", [=](auto& group) { return broadcast_async(tensor(kFew), kVictim, group); }});
  calls.push_back({"recv", [=](auto& group) { return recv_async(tensor(kFew), kVictim, group); }});
  calls.push_back({"send", [=](auto& group) { return send_async(tensor(kMany), kVictim, group); }});
  return calls;
}

void expect_death_is_named(const char* name, const std::function<void()>& call) {
  try {
    call();
  } catch (const CommError& error) {
    const std::string text = error.what();
    const bool names_it = text.find("[1] have died") != std::string::npos ||
                          text.find("rank 1 has died") != std::string::npos ||
                          text.find("rank 1 (pid") != std::string::npos;
    if (!names_it) {
      throw ExpectationError(fmt::format("{}: {}", name, text));
    }
    return;
  }
  throw ExpectationError(fmt::format("{}: no error", name));
}

void check_waits(const std::string& backend) {
  const auto body = [](int rank) {
    signal(SIGTERM, SIG_IGN);
    const std::vector<int64_t> ranks = {0, 1, 2};
    std::vector<ProcessGroupPtr> groups;
    for (const Call& call : calls()) {
      groups.push_back(new_group(ranks, call.name));
    }
    const auto late = new_group(ranks, "late"), after = new_group(ranks, "after");
    std::vector<Pending> pending;
    for (size_t i = 0; i < groups.size() && rank != kVictim; ++i) {
      pending.push_back(calls()[i].launch(groups[i]));
    }
    barrier(default_group());
    if (rank == kVictim) {
      std::this_thread::sleep_for(kLife);
      raise(SIGKILL);
    }
    const auto start = Clock::now();
    if (rank == 0) {  // waits for rank 2, too, which lives and does not call it
      expect_death_is_named("late", [&] { all_reduce(at::zeros({6}), ReduceOp::Sum, late); });
    }
    const auto first = Clock::now();
    for (size_t i = 0; i < pending.size(); ++i) {
      expect_death_is_named(calls()[i].name, [&] { pending[i].wait(); });
    }
    expect_death_is_named("barrier", [&] { barrier(after); });
    const auto others = Clock::now();
    expect_death_is_named("new_group", [&] { new_group(ranks, "new"); });
    const auto ms = [&](auto from, auto to) {
      return std::chrono::duration_cast<std::chrono::milliseconds>(to - from).count();
    };
    std::fprintf(stderr, "all errors came: late %lld ms after the death, others in %lld ms, new_group in %lld ms\n",
                 static_cast<long long>(ms(start + kLife, first)), static_cast<long long>(ms(first, others)),
                 static_cast<long long>(ms(others, Clock::now())));
    end_together(rank == 0 ? 0 : 1);
  };
  const ProcessesResult result = try_run_processes(kRanks, body, {.backend = backend});
  CHECK_THAT(result.message, ContainsSubstring("rank 1") && ContainsSubstring("killed by signal 9"));
  for (const int rank : {0, 2}) {
    CHECK_THAT(result.outputs.at(static_cast<size_t>(rank)), ContainsSubstring("all errors came"));
    UNSCOPED_INFO(result.outputs.at(static_cast<size_t>(rank)));
  }
}

// The launcher ends ranks that wait on 3 s after the death: that is the time they have.
TEST_CASE("every wait of the other ranks ends after a rank has died, and names it: shm") {
  check_waits("shm");
}

TEST_CASE("every wait of the other ranks ends after a rank has died, and names it: gloo") {
  check_waits("gloo");
}

TEST_CASE("every wait of the other ranks ends after a rank has failed, and names it: threads") {
  std::array<std::vector<std::string>, kRanks> unexpected;
  const auto body = [&](int rank) {
    std::vector<ProcessGroupPtr> groups;
    for (const Call& call : calls()) {
      groups.push_back(new_group({0, 1, 2}, call.name));
    }
    std::vector<Pending> pending;
    for (size_t i = 0; i < groups.size() && rank != kVictim; ++i) {
      pending.push_back(calls()[i].launch(groups[i]));
    }
    barrier(default_group());
    if (rank == kVictim) {
      std::this_thread::sleep_for(kLife);
      throw ValueError("no good");
    }
    for (size_t i = 0; i < pending.size(); ++i) {
      std::string text = "no error";
      try {
        pending[i].wait();
      } catch (const CommError& error) {
        text = error.what();
      }
      if (text.find("rank 1 failed: no good") == std::string::npos) {
        unexpected[static_cast<size_t>(rank)].push_back(fmt::format("{}: {}", calls()[i].name, text));
      }
    }
  };
  CHECK_THROWS_WITH(run_ranks(kRanks, body), "rank 1: no good");
  CHECK(unexpected == decltype(unexpected)());
}

}  // namespace
}  // namespace tessera::testing
