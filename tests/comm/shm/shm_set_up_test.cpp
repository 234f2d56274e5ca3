// How ranks find each other and come to share memory: most of it in this process, over a store of the test's own.

#include <ATen/ops/full.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <future>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/context/rank_context.h"
#include "comm/launch/host_process.h"
#include "comm/launch/store.h"
#include "comm/process_group.h"
#include "comm/shm/shm_backend.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "testing/temp_folder.h"
#include "tests/comm/cases/loopback_store.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;
using std::chrono::milliseconds;
using testing::connect_beside;
using testing::free_port;
using testing::launchers_port;
using testing::store_options;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

TEST_CASE("ranks on several hosts: shm is refused, with both hosts named") {
  const RankContextGuard guard(RankContext::create());
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  for (const std::string attempt : {"default/0", "default/1"}) {
    store->set(attempt + "/process/1", std::string("4711 99 another-boot/pid:[1]/0"));
    store->set(attempt + "/process/all_left", std::string("1"));
  }
  const auto init = [&] { init_process_group({.backend = "shm", .rank = 0, .world_size = 2, .store = {store}}); };
  CHECK_THROWS_AS(init(), ValueError);
  CHECK_THROWS_WITH(init(), ContainsSubstring("ranks 0 and 1 do not share a host") &&
                                ContainsSubstring("another-boot/pid:[1]/0") && ContainsSubstring("use \"gloo\""));
}

/// What rank `rank` of two does to set a group up, in a thread of its own.
std::future<void> set_up(int rank, const StorePtr& store, milliseconds timeout = std::chrono::seconds(60)) {
  return std::async(std::launch::async, [=] {
    make_shm_backend({.info = {.name = "pair", .ranks = {0, 1}, .rank = rank, .timeout = timeout},
                      .store = store,
                      .processes = {this_process(), this_process()},
                      .host_ranks = 2});
  });
}

TEST_CASE("shm: rank 0, whose process may serve the store, has set up after the others have read from it") {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const bool is_there = GENERATE(true, false);
  auto rank_0 = set_up(0, store);
  store->set("joined/1", std::string(is_there ? "joined" : "no memory"));
  CHECK(rank_0.wait_for(milliseconds(100)) == std::future_status::timeout);
  store->set("left/1", std::string("left"));
  if (is_there) {
    CHECK_NOTHROW(rank_0.get());
  } else {
    CHECK_THROWS_WITH(rank_0.get(), ContainsSubstring("rank 1: no memory"));
  }
}

TEST_CASE("shm: a rank that gives up keeps rank 0 no longer") {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  CHECK_THROWS_WITH(set_up(1, store, milliseconds(50)).get(), ContainsSubstring("rank 0 did not arrive within 50 ms"));
  CHECK_THROWS_WITH(set_up(0, store).get(), ContainsSubstring("rank 1: connecting the ranks on group 'pair'"));
}

TEST_CASE("shm: a rank opens no other file than rank 0's memory, whatever the store says") {
  for (const std::string& address : {std::string("/dev/null"), std::string("/proc/self/exe"),
                                     fmt::format("/proc/{}/fd/../exe", getpid()), std::string()}) {
    const StorePtr store = c10::make_intrusive<c10d::HashStore>();
    store->set("arena", address);
    store->set("joined/0", std::string("joined"));
    CHECK_THROWS_WITH(set_up(1, store, std::chrono::seconds(5)).get(),
                      ContainsSubstring(fmt::format("\"{}\" is no open file of its process", address)));
  }
  std::array<int, 2> pipe_ends{};
  REQUIRE(pipe(pipe_ends.data()) == 0);
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  store->set("arena", fmt::format("/proc/{}/fd/{}", getpid(), pipe_ends[0]));
  store->set("joined/0", std::string("joined"));
  CHECK_THROWS_WITH(set_up(1, store, std::chrono::seconds(5)).get(),
                    ContainsSubstring("only the shared memory of this library"));
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST_CASE("shm: a file of this user's that the store names is not opened") {
  const testing::TempFolder folder;
  const std::string path = folder.path("own");
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  REQUIRE(ftruncate(file, 1 << 20) == 0);
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  store->set("arena", fmt::format("/proc/{}/fd/{}", getpid(), file));
  store->set("joined/0", std::string("joined"));
  CHECK_THROWS_WITH(set_up(1, store, std::chrono::seconds(5)).get(), ContainsSubstring(fmt::format("it is {}", path)));
  close(file);
}

TEST_CASE("shm: what is refused is not opened before") {
  const testing::TempFolder folder;
  const std::string pipe = folder.path("pipe");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  const int file = open(pipe.c_str(), O_RDWR | O_CLOEXEC);
  const int watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  REQUIRE(inotify_add_watch(watch, pipe.c_str(), IN_OPEN) >= 0);
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  store->set("arena", fmt::format("/proc/{}/fd/{}", getpid(), file));
  store->set("joined/0", std::string("joined"));
  CHECK_THROWS_WITH(set_up(1, store, std::chrono::seconds(5)).get(),
                    ContainsSubstring("only the shared memory of this library"));
  std::array<char, 1024> events{};
  CHECK(read(watch, events.data(), events.size()) == -1);
  close(open(pipe.c_str(), O_RDWR | O_CLOEXEC));
  CHECK(read(watch, events.data(), events.size()) > 0);
  close(watch);
  close(file);
}

TEST_CASE("where a rank does not come to the store, the others fail, and not only the one that serves it") {
  const auto body = [](int rank) {
    const StoreOptions options = store_options(launchers_port(), rank, 3, std::chrono::seconds(1));
    expect_throws<CommError>([&] { connect_store(options); }, fmt::format("rank {} of 3 could not", rank));
  };
  run_processes(2, body, {.backend = "fake"});
}

TEST_CASE("ranks that did not come to the store are named by rank 0, and by others that wait no longer than it") {
  const auto body = [](int rank) {
    const StoreOptions options = store_options(launchers_port(), rank, 4, milliseconds(rank == 0 ? 2000 : 700));
    const std::string text =
        rank == 0 ? "rank 0 of 4 could not gather the other ranks at 127.0.0.1:{} within 2000 ms (ranks 1, 2, 3 did "
                    "not come)"
                  : "rank 1 of 4 could not meet the other ranks at 127.0.0.1:{} within 700 ms (ranks 2, 3 did not "
                    "come)";
    expect_throws<CommError>([&] { connect_store(options); }, fmt::format(fmt::runtime(text), launchers_port()));
  };
  run_processes(2, body, {.backend = "fake"});
}

void init_at_launchers_port(const std::string& backend, int rank, int world_size) {
  init_process_group({.backend = backend,
                      .rank = rank,
                      .world_size = world_size,
                      .timeout = std::chrono::seconds(20),
                      .master_addr = "127.0.0.1",
                      .master_port = launchers_port()});
}

TEST_CASE("ranks of another job that comes to the same address fail, and those that have met go on") {
  const std::string backend = GENERATE("shm", "gloo");
  const auto first_job = [&](int rank) {
    init_at_launchers_port(backend, rank, 2);
    const StorePtr beside = connect_beside();
    beside->set(fmt::format("met/{}", rank), std::string());
    beside->wait({"refused/0", "refused/1"});
    at::Tensor tensor = at::full({1000}, float(rank + 1));
    all_reduce(tensor, ReduceOp::Sum, default_group());
    TESSERA_EXPECT(tensor.equal(at::full({1000}, 3.f)));
    destroy_process_group();
  };
  const auto second_job = [&](int rank) {
    const StorePtr beside = connect_beside();
    beside->wait({"met/0", "met/1"});
    expect_throws<CommError>([&] { init_at_launchers_port(backend, rank, 2); },
                             rank == 0 ? "rank 0 of 2 could not gather the other ranks at 127.0.0.1"
                                       : "another process is rank 1 of 2 at 127.0.0.1");
    if (rank == 1) {
      expect_throws<CommError>([&] { init_at_launchers_port(backend, rank, 3); }, "2 ranks have met at 127.0.0.1");
    }
    beside->set(fmt::format("refused/{}", rank), std::string());
  };
  const auto body = [&](int process) {
    const RankContextGuard guard(RankContext::create());
    process < 2 ? first_job(process) : second_job(process - 2);
  };
  run_processes(4, body, {.backend = "fake"});
}

TEST_CASE("a rank that gave up on the others may come again") {
  const int port = free_port();
  const auto connect = [&](int rank, milliseconds timeout = std::chrono::seconds(20)) {
    return std::async(std::launch::async, [=] { connect_store(store_options(port, rank, 3, timeout)); });
  };
  auto rank_0 = connect(0);
  CHECK_THROWS_AS(connect(1, milliseconds(300)).get(), CommError);
  auto rank_1 = connect(1), rank_2 = connect(2);
  CHECK_NOTHROW(rank_0.get());
  CHECK_NOTHROW(rank_1.get());
  CHECK_NOTHROW(rank_2.get());
}

TEST_CASE("a rank that meets at another port than the launcher's listens there") {
  const auto body = [](int) {
    const auto store = connect_store(store_options(free_port(), 0, 1));
    const auto launchers = connect_store(store_options(launchers_port(), 0, 1));
    TESSERA_EXPECT(store != launchers);
  };
  run_processes(1, body, {.backend = "fake"});
}

/// Becomes a rank of a job of two in a process of its own; returns how that ended.
int run_rank(int rank, bool is_killed) {
  const pid_t child = fork();
  if (child == 0) {
    const RankContextGuard guard(RankContext::create());
    try {
      init_at_launchers_port("shm", rank, 2);
      if (is_killed) {
        kill(getpid(), SIGKILL);
      }
      barrier(default_group());
      destroy_process_group();
    } catch (const std::exception& failure) {
      fmt::print(stderr, "{}\n", failure.what());
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST_CASE("ranks that torchrun starts again meet in its store, and not those that are dead") {
  const auto body = [](int process) {
    if (process == 0) {  // as torchrun's agent
      const StorePtr store = connect_beside(
          {.port = 0, .isServer = true, .masterListenFd = std::atoi(std::getenv("TESSERA_LISTEN_SOCKET"))});
      store->wait({"ended/0", "ended/1"});
      return;
    }
    const int rank = process - 1;
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    setenv("TORCHELASTIC_RESTART_COUNT", "0", 1);
    const int first = run_rank(rank, /*is_killed=*/true);
    TESSERA_EXPECT(WIFSIGNALED(first));
    setenv("TORCHELASTIC_RESTART_COUNT", "1", 1);
    expect_equal(run_rank(rank, /*is_killed=*/false), 0);
    connect_beside()->set(fmt::format("ended/{}", rank), std::string());
  };
  run_processes(3, body, {.backend = "fake"});
}

TEST_CASE("a rank that gave up on the others is not counted among those in torchrun's store") {
  const auto body = [](int) {  // one process is the agent and, in threads, both ranks
    const StorePtr agent = connect_beside(
        {.port = 0, .isServer = true, .masterListenFd = std::atoi(std::getenv("TESSERA_LISTEN_SOCKET"))});
    unsetenv("TESSERA_LISTEN_SOCKET");
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    setenv("TORCHELASTIC_RESTART_COUNT", "0", 1);
    const auto connect = [port = launchers_port()](int rank, milliseconds timeout) {
      return connect_store(store_options(port, rank, 2, timeout));
    };
    expect_throws<CommError>([&] { connect(1, milliseconds(300)); }, "rank 1 of 2 could not reach rank 0");
    expect_throws<CommError>([&] { connect(0, milliseconds(300)); }, "rank 0 of 2 could not gather the other ranks");
    auto rank_0 = std::async(std::launch::async, connect, 0, std::chrono::seconds(20));
    TESSERA_EXPECT(connect(1, std::chrono::seconds(20)));
    TESSERA_EXPECT(rank_0.get());
  };
  run_processes(1, body, {.backend = "fake"});
}

TEST_CASE("ranks that are threads of one process meet at an address, too") {
  const auto run = [port = free_port()](int rank) {
    const RankContextGuard guard(RankContext::create());
    init_process_group({.backend = "gloo",
                        .rank = rank,
                        .world_size = 2,
                        .timeout = std::chrono::seconds(10),
                        .master_addr = "127.0.0.1",
                        .master_port = port});
    at::Tensor tensor = at::full({1}, float(rank + 1));
    all_reduce(tensor, ReduceOp::Sum, default_group());
    destroy_process_group();
    return tensor.item<float>();
  };
  auto rank_1 = std::async(std::launch::async, run, 1), rank_0 = std::async(std::launch::async, run, 0);
  CHECK(rank_0.get() == 3.f);
  CHECK(rank_1.get() == 3.f);
}

TEST_CASE("an attempt to set the default group up leaves nothing to the next one") {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const RankContext contexts[] = {RankContext::create(), RankContext::create()};
  const auto init = [&](int rank, milliseconds timeout) {
    const RankContextGuard guard(contexts[rank]);
    init_process_group({.backend = "shm", .rank = rank, .world_size = 2, .timeout = timeout, .store = {store}});
  };
  const auto use = [&](int rank) {
    init(rank, std::chrono::seconds(60));
    const RankContextGuard guard(contexts[rank]);
    barrier(default_group());
    destroy_process_group();
  };
  store->setTimeout(milliseconds(50));
  for (const int rank : {0, 1}) {  // each comes when the other has given up
    CHECK_THROWS_AS(init(rank, milliseconds(50)), CommError);
  }
  store->setTimeout(std::chrono::seconds(60));
  auto rank_0 = std::async(std::launch::async, use, 0);
  CHECK_NOTHROW(use(1));
  CHECK_NOTHROW(rank_0.get());
}

}  // namespace
}  // namespace tessera
