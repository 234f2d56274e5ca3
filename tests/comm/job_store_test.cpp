// What strangers can do to what ranks say in a store, with a secret and without one.

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "base/error.h"
#include "comm/context/rank_context.h"
#include "comm/launch/host_process.h"
#include "comm/launch/job_secret.h"
#include "comm/launch/job_store.h"
#include "comm/launch/listen_socket.h"
#include "comm/launch/store.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "tests/comm/cases/loopback_store.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::connect_beside;
using testing::free_port;
using testing::launchers_port;
using testing::store_options;
using JobStorePtr = c10::intrusive_ptr<JobStore>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

const std::string kOneSecret = "the secret of the ranks", kOtherSecret = "the secret of others";

StoreValue bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string text_of(const StoreValue& value) {
  return {value.begin(), value.end()};
}

StorePtr stranger_at(int port) {
  return connect_beside({.port = static_cast<uint16_t>(port)});
}

/// set() and append() do not wait for an answer: returns when the store has what was told to it before by `store`.
void settle(c10d::Store& store) {
  store.getNumKeys();
}

/// Two ranks of a job, the first of which serves the store, and a stranger.
struct RanksAndStranger {
  explicit RanksAndStranger(const std::optional<std::string>& secret = kOneSecret)
      : rank_0(connect(secret, true)), rank_1(connect(secret, false)), stranger(stranger_at(port)) {}

  JobStorePtr connect(const std::optional<std::string>& secret, bool serves, const std::string& job = "job") const {
    c10d::TCPStoreOptions tcp = {
        .port = static_cast<uint16_t>(port), .isServer = serves, .timeout = std::chrono::seconds(20)};
    if (serves) {
      tcp.masterListenFd = listen_at("127.0.0.1", port);
    }
    const auto own = secret ? std::optional<JobSecret>(std::in_place, *secret, job) : std::nullopt;
    return c10::make_intrusive<JobStore>("127.0.0.1", tcp, "rank 0", own);
  }

  const int port = free_port();
  const JobStorePtr rank_0, rank_1;
  const StorePtr stranger;
};

/// All ways to read the value of "key".
const std::vector<std::function<std::string(c10d::Store& store)>> kReads = {
    [](c10d::Store& store) { return store.get_to_str("key"); },
    [](c10d::Store& store) { return text_of(store.multiGet({"key"}).at(0)); },
    [](c10d::Store& store) { return store.compareSet("key", "something", "something else"); },
    [](c10d::Store& store) { return store.clone()->get_to_str("key"); },
};

TEST_CASE("what one rank stores another one reads, with a secret and without") {
  const RanksAndStranger job(GENERATE(std::optional<std::string>(kOneSecret), std::optional<std::string>()));
  c10d::Store &rank_0 = *job.rank_0, &rank_1 = *job.rank_1;
  rank_0.set("a", std::string("one"));
  rank_0.set("empty", std::string());
  CHECK(rank_1.get_to_str("a") == "one");
  CHECK(rank_1.get_to_str("empty").empty());

  CHECK(rank_0.compareSet("b", std::string(), std::string("first")) == "first");
  CHECK(rank_1.compareSet("b", std::string(), std::string("second")) == "first");
  CHECK(rank_1.compareSet("b", std::string("no"), std::string("second")) == "first");
  CHECK(rank_1.compareSet("b", std::string("first"), std::string("second")) == "second");
  CHECK(rank_0.get_to_str("b") == "second");
  CHECK(rank_0.compareSet("absent", std::string("expected"), std::string("new")) == "expected");

  rank_0.multiSet({"m/0", "m/1"}, {bytes("zero"), bytes("one")});
  CHECK(rank_1.multiGet({"m/1", "m/0"}) == std::vector<StoreValue>{bytes("one"), bytes("zero")});
  rank_0.append("list", bytes("one, "));
  settle(rank_0);
  rank_1.append("list", bytes("two"));
  CHECK(rank_1.get_to_str("list") == "one, two");
  rank_0.append("m/0", bytes(" and a half"));
  settle(rank_0);
  CHECK(rank_1.get_to_str("m/0") == "zero and a half");
  c10d::PrefixStore("group", job.rank_0).set("name", bytes("of a group"));
  CHECK(c10d::PrefixStore("group", job.rank_1).get("name") == bytes("of a group"));
  CHECK(job.rank_1->clone()->get("group/name") == bytes("of a group"));
  rank_0.queuePush("queue", bytes("first in"));
  rank_0.queuePush("queue", bytes("second in"));
  settle(rank_0);
  CHECK(rank_1.queuePop("queue", true) == bytes("first in"));
  CHECK(rank_1.queuePop("queue", false) == bytes("second in"));

  CHECK(rank_0.add("counter", 2) == 2);
  CHECK(rank_1.add("counter", 3) == 5);
  CHECK(rank_1.check({"a", "counter"}));
  CHECK(rank_1.deleteKey("a"));
  CHECK_FALSE(rank_0.check({"a"}));
}

TEST_CASE("without a secret the store has the values themselves, with one a tag before each") {
  const RanksAndStranger open_job(std::optional<std::string>{}), job;
  open_job.rank_0->set("key", bytes("value"));
  CHECK(open_job.stranger->get_to_str("key") == "value");
  open_job.stranger->set("key", std::string("a stranger's"));
  settle(*open_job.stranger);
  CHECK(open_job.rank_1->get("key") == bytes("a stranger's"));
  job.rank_0->set("key", bytes("value"));
  CHECK(job.stranger->get("key") == JobSecret(kOneSecret, "job").seal("key", bytes("value")));
}

TEST_CASE("a value that a stranger wrote is refused, and its key and address are named") {
  const RanksAndStranger job;
  const auto refused = [&](const StoreValue& value) {
    job.rank_0->set("key", bytes("a rank's"));
    settle(*job.rank_0);
    for (const auto& read : kReads) {
      CHECK(read(*job.rank_1) == "a rank's");
    }
    job.stranger->set("key", value);
    settle(*job.stranger);
    for (const auto& read : kReads) {
      CHECK_THROWS_AS(read(*job.rank_1), CommError);
      CHECK_THROWS_WITH(read(*job.rank_1),
                        ContainsSubstring(fmt::format("the store's key \"key\" at 127.0.0.1:{} has a value that no "
                                                      "rank with this one's TESSERA_JOB_SECRET wrote",
                                                      job.port)) &&
                            ContainsSubstring("set the same on all ranks") && !ContainsSubstring(kOneSecret));
    }
  };
  refused(bytes("a stranger's"));
  refused({});
  refused(JobSecret(kOtherSecret, "job").seal("key", bytes("a stranger's")));
  refused(JobSecret(kOneSecret, "an earlier job").seal("key", bytes("an earlier job's")));
  job.rank_0->set("other key", bytes("of another key"));
  refused(job.stranger->get("other key"));

  job.rank_0->set("key", bytes("a rank's"));
  settle(*job.rank_0);
  job.stranger->append("key", bytes("more"));
  settle(*job.stranger);
  CHECK_THROWS_WITH(job.rank_1->get("key"), ContainsSubstring("\"key\""));
  job.stranger->queuePush("queue", bytes("a stranger's"));
  CHECK_THROWS_WITH(job.rank_1->queuePop("queue", true), ContainsSubstring("\"queue\""));
}

TEST_CASE("a rank without a secret says so where it reads a value that has a tag") {
  const RanksAndStranger job;
  const JobStorePtr without = job.connect(std::nullopt, false);
  job.rank_0->set("key", bytes("value"));
  CHECK_THROWS_AS(without->get("key"), CommError);
  CHECK_THROWS_WITH(without->get("key"), ContainsSubstring("\"key\"") &&
                                             ContainsSubstring("this rank has no TESSERA_JOB_SECRET to check it"));
}

/// Ranks that are threads meet at a port, each with a secret or none; returns each one's error, "" where it has met.
std::vector<std::string> meet_with(int port, const std::vector<std::optional<std::string>>& secrets) {
  std::vector<std::future<std::string>> ranks;
  ranks.reserve(secrets.size());
  for (size_t rank = 0; rank < secrets.size(); ++rank) {
    StoreOptions options = store_options(port, static_cast<int>(rank), static_cast<int>(secrets.size()));
    options.secret = secrets[rank];
    ranks.push_back(std::async(std::launch::async, [options]() -> std::string {
      try {
        connect_store(options);
      } catch (const CommError& failure) {
        return failure.what();
      }
      return "";
    }));
  }
  std::vector<std::string> errors;
  errors.reserve(ranks.size());
  for (auto& rank : ranks) {
    errors.push_back(rank.get());
  }
  return errors;
}

TEST_CASE("ranks that have one secret, or all none, meet") {
  CHECK(meet_with(free_port(), {kOneSecret, kOneSecret, kOneSecret}) == std::vector<std::string>(3));
  CHECK(meet_with(free_port(), {std::nullopt, std::nullopt}) == std::vector<std::string>(2));
}

TEST_CASE("where ranks' secrets differ, or one has none, all ranks say so, and before the time-out") {
  using Secret = std::optional<std::string>;
  const auto [of_rank_0, of_rank_1] = GENERATE(
      table<Secret, Secret>({{kOneSecret, kOtherSecret}, {kOneSecret, std::nullopt}, {std::nullopt, kOneSecret}}));
  const int port = free_port();
  const std::vector<std::string> errors = meet_with(port, {of_rank_0, of_rank_1, of_rank_0});
  const std::string rank_0s =
      fmt::format("rank 1 has come to 127.0.0.1:{} with another TESSERA_JOB_SECRET than rank 0, which has {}", port,
                  of_rank_0 ? "one" : "none");
  CHECK_THAT(errors[0], ContainsSubstring(rank_0s) && ContainsSubstring("set the same on all ranks"));
  CHECK_THAT(errors[1], ContainsSubstring(fmt::format("rank 1 of 3: the store's key \"job\" at 127.0.0.1:{}", port)) &&
                            ContainsSubstring("TESSERA_JOB_SECRET") && ContainsSubstring("set the same on all ranks"));
  CHECK_THAT(errors[2], ContainsSubstring(rank_0s));
}

TEST_CASE("a rank of another job that has another secret learns whose job has the address, which goes on") {
  StoreOptions options = store_options(free_port(), 0, 2);
  options.job = "first";
  options.secret = kOneSecret;
  auto rank_0 = std::async(std::launch::async, [options] { return connect_store(options); });
  options.rank = 1;
  StoreOptions others = options;
  others.job = "second";
  others.secret = GENERATE(std::optional<std::string>(kOneSecret), std::optional<std::string>(kOtherSecret),
                           std::optional<std::string>());
  CHECK_THROWS_WITH(connect_store(others), ContainsSubstring("job \"first\" meets at 127.0.0.1:"));
  CHECK_NOTHROW(connect_store(options));
  CHECK_NOTHROW(rank_0.get());
  others.rank = 0;
  others.world_size = 3;  // else it is the rank that is connected in this process
  CHECK_THROWS_WITH(connect_store(others), ContainsSubstring("job \"first\" meets there"));
}

TEST_CASE("a stranger that takes a rank's seat or changes whose job it is: the ranks name the key") {
  const std::string key = GENERATE("seat/3/2", "job");
  StoreOptions options = store_options(free_port(), 0, 3);
  options.secret = kOneSecret;
  auto rank_0 = std::async(std::launch::async, [options] { connect_store(options); });
  const StorePtr stranger = stranger_at(options.port);
  stranger->wait({"job"});
  stranger->set(key, key == "job" ? std::string("job ") : to_text(this_process()));
  stranger->set("seat/3/2/taken", std::string());
  settle(*stranger);
  options.rank = 1;
  const std::string named = fmt::format("the store's key \"{}\" at 127.0.0.1:{}", key, options.port);
  CHECK_THROWS_WITH(connect_store(options), ContainsSubstring(named));
  CHECK_THROWS_WITH(rank_0.get(), ContainsSubstring(key == "job" ? "rank 1 has come to 127.0.0.1:" : named));
}

/// A rank of two that sets a group up, and what a stranger writes to the group's store meanwhile.
struct Attack {
  std::string backend;
  int rank;
  std::string key;
  std::string value;
  /// What the other rank says in the group's store.
  std::function<void(c10d::Store& store)> peer;
};

/// The rank's error names the key. The other process is its peer, and the stranger.
void check_refused(const Attack& attack) {
  const auto body = [&](int process) {
    const RankContextGuard guard(RankContext::create());
    if (process == attack.rank) {
      const auto init = [&] {
        init_process_group({.backend = attack.backend,
                            .rank = attack.rank,
                            .world_size = 2,
                            .timeout = std::chrono::seconds(20),
                            .master_addr = "127.0.0.1",
                            .master_port = launchers_port()});
      };
      expect_throws<CommError>(init, fmt::format("the store's key \"default/0/{}\"", attack.key));
      connect_beside()->set("refused", std::string());
      return;
    }
    StoreOptions options = store_options(launchers_port(), process, 2);
    options.job = parse_job_identity(process_variable);
    options.secret = parse_job_secret(process_variable);
    TESSERA_EXPECT(options.secret.has_value());
    const StorePtr store = connect_store(options), beside = connect_beside();
    beside->set("default/0/" + attack.key, attack.value);
    settle(*beside);
    c10d::PrefixStore groups("default/0", store);
    attack.peer(groups);
    try {
      beside->wait({"refused"});
    } catch (const std::exception&) {  // rank 0, which serves the store, has ended
    }
  };
  run_processes(2, body, {.backend = "fake"});
}

TEST_CASE("a process that a stranger says is a rank's is refused, with the key named") {
  check_refused(
      {.backend = "gloo", .rank = 0, .key = "process/1", .value = to_text(this_process()), .peer = [](c10d::Store&) {
       }});
}

TEST_CASE("gloo: a peer's address that a stranger wrote is refused, with the key named") {
  const auto peer = [](c10d::Store& store) {
    exchange_processes(store, 1, 2);
    store.set("here/1", std::string());
  };
  check_refused({.backend = "gloo", .rank = 0, .key = "0/1", .value = "a stranger's address", .peer = peer});
}

TEST_CASE("shm: a path that a stranger says is rank 0's memory is refused, with the key named") {
  const auto peer = [](c10d::Store& store) {
    exchange_processes(store, 0, 2);
    store.set("joined/0", std::string("joined"));
  };
  const std::string path = fmt::format("/proc/{}/fd/0", getpid());
  check_refused({.backend = "shm", .rank = 1, .key = "arena", .value = path, .peer = peer});
}

}  // namespace
}  // namespace tessera
