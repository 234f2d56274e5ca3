// Messages between ranks that are processes, over shm and gloo.

#include <ATen/ops/zeros.h>
#include <signal.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/point_to_point.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "tests/comm/cases/point_to_point_cases.h"
#include "tests/comm/cases/shared_tensors.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

using Catch::Matchers::ContainsSubstring;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

const RunProcessesOptions kGloo = {.backend = "gloo"};

// run_processes ends with a barrier, for which a group that failed is no good. The ranks meet in the new one.
void start_anew(const std::string& backend, milliseconds timeout = std::chrono::seconds(60)) {
  destroy_process_group();
  init_process_group(ProcessGroupOptions{.backend = backend, .timeout = timeout});
}

int64_t open_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

/// A group of the shm backend has one open file, messages need none, and it is closed with the group.
void check_open_files() {
  const int64_t before = open_files();
  {
    const ProcessGroupPtr pair = new_group({0, 1}, "pair");
    expect_equal(open_files(), before + 1);
    for (int i = 0; i < 3; ++i) {
      Pending received = recv_async(at::zeros({3}), 1 - get_rank(), pair);
      send(at::zeros({3}), 1 - get_rank(), pair);
      received.wait();
    }
    expect_equal(open_files(), before + 1);
  }
  expect_equal(open_files(), before);
}

void check_two_ranks(const RunProcessesOptions& backend, const std::string& error_of_peer_that_left) {
  const auto body = [&](int) {
    check_refusals();
    check_messages(/*largest=*/700001);  // of the widest dtype six rings of slots
    check_exchange(5 * 1024 * 1024);
    check_many_in_flight();
    check_dropped_messages();
    check_order_is_free();
    check_c10d();
    check_ends_that_differ();
    check_peer_that_left(error_of_peer_that_left);
    if (backend.backend == "shm") {
      check_open_files();
    }
  };
  run_processes(2, body, backend);
}

void check_four_ranks(const RunProcessesOptions& backend) {
  const auto body = [](int) {
    check_messages(/*largest=*/10001);
    check_ring();
    check_order_is_free();
    check_exchange(300000);
    check_sub_group();
  };
  run_processes(4, body, backend);
}

/// Rank 1 dies: ranks 0 and 2 wait for its messages and have an error that holds `error` within two seconds.
void check_messages_of_dead_peer(const RunProcessesOptions& backend, const std::string& error) {
  const auto body = [&](int rank) {
    signal(SIGTERM, SIG_IGN);
    const at::Tensor tensor = at::zeros({100000});
    if (rank == 1) {
      recv(tensor, 0, default_group());
      recv(tensor, 2, default_group());
      barrier(default_group());
      raise(SIGKILL);
    }
    send(tensor, 1, default_group());
    barrier(default_group());
    const auto start = Clock::now();
    const auto call = [&] { rank == 0 ? recv(tensor, 1, default_group()) : send(tensor, 1, default_group()); };
    expect_throws<CommError>(call, error);
    TESSERA_EXPECT(Clock::now() - start < std::chrono::seconds(2));
    std::fprintf(stderr, "had the error\n");
  };
  const ProcessesResult result = try_run_processes(3, body, backend);
  CHECK(result.exit_code == 128 + SIGKILL);
  CHECK_THAT(result.message, ContainsSubstring("rank 1") && ContainsSubstring("killed by signal 9"));
  CHECK_THAT(result.outputs[0], ContainsSubstring("had the error"));
  CHECK_THAT(result.outputs[2], ContainsSubstring("had the error"));
}

/// Rank 1 comes too late.
void check_time_out(const RunProcessesOptions& backend, const std::string& error, const std::string& error_of_late) {
  const auto body = [&](int rank) {
    start_anew(backend.backend, milliseconds(1000));
    barrier(default_group());
    const at::Tensor tensor = at::zeros({4});
    const auto start = Clock::now();
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(2000));
      expect_throws<CommError>([&] { send(tensor, 0, default_group()); }, error_of_late);
    } else {
      expect_throws<CommError>([&] { recv(tensor, 1, default_group(), 9); },
                               "recv(from rank 1, tag 9, Float[4]) on group 'default' (rank 0 of ranks [0, 1]): ");
      TESSERA_EXPECT(Clock::now() - start > milliseconds(900) && Clock::now() - start < milliseconds(5000));
      expect_throws<CommError>([&] { recv(tensor, 1, default_group()); }, error);
    }
    start_anew(backend.backend);
  };
  run_processes(2, body, backend);
}

TEST_CASE("messages between two processes over shm") {
  check_two_ranks(kShm, "rank(s) [1] have ended without calling it");
}

TEST_CASE("messages between two processes over gloo") {
  check_two_ranks(kGloo, "on group 'pair'");
}

TEST_CASE("messages between four processes over shm") {
  check_four_ranks(kShm);
}

TEST_CASE("messages between four processes over gloo") {
  check_four_ranks(kGloo);
}

TEST_CASE("shm: a peer that dies is named within two seconds") {
  check_messages_of_dead_peer(kShm, "rank(s) [1] have died");
}

TEST_CASE("gloo: a peer that dies is named within two seconds") {
  check_messages_of_dead_peer(kGloo, "rank(s) [1] have died");
}

TEST_CASE("shm: a message that does not come in time names its sender, who learns of it") {
  check_time_out(kShm, "rank(s) [1] did not arrive within 1000 ms",
                 "rank 0 failed: recv(from rank 1, tag 9, Float[4])");
}

TEST_CASE("gloo: a message that does not come in time") {
  check_time_out(kGloo, "rank 1 left, called something else, or did not arrive within 1000 ms",
                 "rank 0 left, called something else, or did not arrive within 1000 ms");
}

}  // namespace
}  // namespace tessera::testing
