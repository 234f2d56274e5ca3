// How ranks that are processes meet over the store, and what becomes of those that cannot: the ranks of the "fake"
// backend leave the launcher's port to the test.

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/context/rank_context.h"
#include "comm/launch/job_secret.h"
#include "comm/launch/rank_environment.h"
#include "comm/launch/store.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "tests/comm/cases/loopback_store.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::connect_beside;
using testing::end_together;
using testing::free_port;
using testing::launchers_port;
using testing::LoopbackSocket;
using testing::store_options;

/// Runs `action` in a process of its own, which is killed when the store has `keys`.
void run_and_kill(const std::function<void()>& action, const std::vector<std::string>& keys) {
  const pid_t child = fork();
  if (child == 0) {
    try {
      action();
    } catch (const std::exception&) {
    }
    pause();
  }
  connect_beside()->wait(keys);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST_CASE("a program at MASTER_PORT that says nothing: the time-out ends the wait") {
  const RankContextGuard guard(RankContext::create());
  LoopbackSocket silent;
  silent.listen_without_a_word();
  const auto start = Clock::now();
  const auto init = [&] {
    init_process_group({.backend = "gloo",
                        .rank = 1,
                        .world_size = 2,
                        .timeout = seconds(1),
                        .master_addr = "127.0.0.1",
                        .master_port = silent.port()});
  };
  CHECK_THROWS_MATCHES(init(), CommError,
                       Catch::Matchers::Message(
                           fmt::format("init_process_group: rank 1 of 2 could not reach rank 0 at 127.0.0.1:{} "
                                       "within 1000 ms (what listens there has not answered; it may be another "
                                       "program); check MASTER_ADDR and MASTER_PORT and that every rank was started",
                                       silent.port())));
  CHECK(Clock::now() - start < seconds(3));
}

TEST_CASE("a rank 0 that stops answering: a call of the store ends at the time-out") {
  const auto body = [](int rank) {
    const auto store = connect_store(store_options(launchers_port(), rank, 2, seconds(rank == 0 ? 20 : 1)));
    const auto beside = connect_beside();
    if (rank == 0) {
      beside->set("pid", std::to_string(getpid()));
      beside->wait({"was silent"});
      return;
    }
    const pid_t rank_0 = std::stoi(beside->get_to_str("pid"));
    kill(rank_0, SIGSTOP);
    std::this_thread::sleep_for(milliseconds(200));  // until all of its threads have stopped
    const auto start = Clock::now();
    expect_throws<CommError>([&] { store->check({"some"}); }, "rank 0, which serves the store at 127.0.0.1:");
    const auto waited = Clock::now() - start;
    kill(rank_0, SIGCONT);
    TESSERA_EXPECT(waited < seconds(4));
    beside->set("was silent", std::string());
  };
  run_processes(2, body, {.backend = "fake"});
}

TEST_CASE("ranks of two jobs that start at once at one address do not mix, and learn who has it") {
  const auto body = [](int process) {
    const RankContextGuard guard(RankContext::create());
    const bool is_first = process < 2;
    setenv("TESSERA_JOB_ID", is_first ? "first" : "second", 1);
    const int rank = process % 2;
    const auto init = [&] {
      init_process_group({.backend = "gloo",
                          .rank = rank,
                          .world_size = 2,
                          .timeout = seconds(20),
                          .master_addr = "127.0.0.1",
                          .master_port = launchers_port()});
    };
    if (is_first) {  // whose rank 0 has the launcher's socket
      init();
      barrier(default_group());
      destroy_process_group();
      if (rank == 0) {  // which serves the store
        connect_beside()->wait({"refused/0", "refused/1"});
      }
      return;
    }
    if (rank == 0) {
      connect_beside()->wait({"job"});  // it could not say whose before
    }
    expect_throws<CommError>(init, rank == 0 ? "job \"first\" meets there" : "job \"first\" meets at 127.0.0.1:");
    connect_beside()->set(fmt::format("refused/{}", rank), std::string());
  };
  run_processes(4, body, {.backend = "fake"});
}

TEST_CASE("a rank that dies before all have met: those that have come learn which, soon") {
  const auto body = [](int rank) {
    const auto connect = [&] { connect_store(store_options(launchers_port(), rank, 4, seconds(30))); };
    if (rank == 2) {
      run_and_kill(connect, {"seat/4/2/taken"});
      return;
    }
    const auto start = Clock::now();
    expect_throws<CommError>(connect, "rank 2 of 4 (pid ");
    TESSERA_EXPECT(Clock::now() - start < seconds(6));
  };
  run_processes(3, body, {.backend = "fake"});
}

TEST_CASE("a rank 0 that dies before all have met is named by the others, soon") {
  const auto body = [](int rank) {
    const auto connect = [&] { connect_store(store_options(launchers_port(), rank, 3, seconds(30))); };
    if (rank == 0) {
      run_and_kill(connect, {"seat/3/1/taken"});
      return;
    }
    const auto start = Clock::now();
    expect_throws<CommError>(connect, "rank 0, which serves the store at 127.0.0.1:");
    TESSERA_EXPECT(Clock::now() - start < seconds(6));
  };
  run_processes(2, body, {.backend = "fake"});
}

TEST_CASE("a rank that dies after all have met, and before they have a group: the others learn which, soon") {
  const int victim = GENERATE(0, 2);  // 0 serves the store
  const auto body = [&](int rank) {
    const RankContextGuard guard(RankContext::create());
    const auto meet = [&] {
      StoreOptions options = store_options(launchers_port(), rank, 3, seconds(30));
      options.job = parse_job_identity(process_variable);
      options.secret = parse_job_secret(process_variable);
      connect_store(options);
    };
    if (rank == victim) {
      run_and_kill(
          meet, victim == 0 ? std::vector<std::string>{"met/1", "met/2"} : std::vector<std::string>{"met/0", "met/1"});
      return;
    }
    meet();
    connect_beside()->set(fmt::format("met/{}", rank), std::string());
    const auto start = Clock::now();
    const auto init = [&] {
      init_process_group({.backend = "gloo",
                          .rank = rank,
                          .world_size = 3,
                          .timeout = seconds(30),
                          .master_addr = "127.0.0.1",
                          .master_port = launchers_port()});
    };
    expect_throws<CommError>(init, victim == 0 ? "rank 0, which serves the store at 127.0.0.1:"
                                               : "could not learn where the other ranks run: rank 2 (pid ");
    TESSERA_EXPECT(Clock::now() - start < seconds(5));
    if (victim != 0) {
      end_together(rank);
    }
  };
  run_processes(3, body, {.backend = "fake"});
}

/// Returns true if a socket listens at the port of that address of this host.
bool is_open(const char* host, int port) {
  const int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, host, &address.sin_addr);
  const bool is_open = connect(file, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  close(file);
  return is_open;
}

TEST_CASE("connections that say nothing do not keep ranks from meeting") {
  const int port = free_port();
  const auto connect_rank = [&](int rank) {
    return std::async(std::launch::async, [=] { connect_store(store_options(port, rank, 2, seconds(20))); });
  };
  auto rank_0 = connect_rank(0);
  while (!is_open("127.0.0.1", port)) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  std::vector<std::unique_ptr<LoopbackSocket>> idle;
  for (int i = 0; i < 200; ++i) {
    idle.push_back(std::make_unique<LoopbackSocket>());
    REQUIRE(idle.back()->connect_to(port));
  }
  const auto start = Clock::now();
  auto rank_1 = connect_rank(1);
  CHECK_NOTHROW(rank_1.get());
  CHECK_NOTHROW(rank_0.get());
  CHECK(Clock::now() - start < seconds(10));
}

TEST_CASE("rank 0 listens at the address that it is given, and nowhere else") {
  for (const char* name : {"127.0.0.1", "localhost"}) {
    StoreOptions options = store_options(free_port(), 0, 1, seconds(20));
    options.address = name;
    const auto store = connect_store(options);
    CHECK(is_open("127.0.0.1", options.port));
    CHECK_FALSE(is_open("127.0.0.2", options.port));
  }
}

}  // namespace
}  // namespace tessera
