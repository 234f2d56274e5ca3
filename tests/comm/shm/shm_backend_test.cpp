// The shm backend with ranks as processes: the cases that it shares with gloo, and what is its own.

#include "comm/shm/shm_backend.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "base/open_files.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "tests/comm/cases/differing_calls.h"
#include "tests/comm/cases/parts_cases.h"
#include "tests/comm/cases/process_backend_cases.h"
#include "tests/comm/cases/shared_tensors.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

using Catch::Matchers::ContainsSubstring;
using std::chrono::milliseconds;
using std::chrono::seconds;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const CommError& failure) {
    return failure.what();
  }
  return "";
}

// run_processes ends with a barrier, for which a group that failed is no good. The ranks meet in the new one.
void start_shm_anew() {
  destroy_process_group();
  init_process_group(ProcessGroupOptions{.backend = "shm"});
}

TEST_CASE("shm gives the same bits as threads, for every dtype") {
  for (const int world_size : {1, 2, 3, 4}) {
    check_same_bits_as_threads("shm", world_size, reducible_dtypes(), {17});
  }
}

TEST_CASE("shm gives the same bits as threads, for sizes from nothing to many slots") {
  check_same_bits_as_threads("shm", 2, {c10::kFloat}, {0, 1, 1000, 300001});
  check_same_bits_as_threads("shm", 3, {c10::kBFloat16, c10::kDouble}, {1, 70001});
  check_same_bits_as_threads("shm", 4, {c10::kFloat}, {0, 20011, 70001});
}

TEST_CASE("shm: an output beyond the cache is written past it, whatever its alignment") {
  const auto body = [](int rank) {
    const int64_t count = 2100003;  // floats: 16.8 MB in all
    at::Tensor space = at::zeros({2 * count + 1});
    for (const int64_t offset : {0, 1}) {
      const at::Tensor gathered = space.narrow(0, offset, 2 * count);
      all_gather(gathered, at::full({count}, float(rank + 1 + offset)), default_group());
      for (int64_t from = 0; from < 2; ++from) {
        TESSERA_EXPECT(gathered.narrow(0, from * count, count).equal(at::full({count}, float(from + 1 + offset))));
      }
    }
    expect_equal(space[0].item<float>(), 1.f);
  };
  run_processes(2, body, kShm);
}

TEST_CASE("shm: collectives with parts give the bits of those with one tensor") {
  const auto body = [](int) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      check_segments_against_flat(seed, /*largest=*/20, c10::kFloat);
      check_segments_against_flat(seed, /*largest=*/40000, c10::kBFloat16);
    }
    // Several slots; and, with 2 ranks, outputs beyond the cache.
    check_segments_against_flat(/*seed=*/3, /*largest=*/1000000, c10::kFloat);
    check_segments_against_flat(/*seed=*/4, /*largest=*/1000000, c10::kFloat);
  };
  run_processes(2, body, kShm);
  run_processes(3, body, kShm);
}

TEST_CASE("sub-groups over shm, made again and again") {
  check_sub_groups("shm");
}

TEST_CASE("shm: collectives in flight may be waited for in any order") {
  check_waits_in_any_order("shm", 1500000);
}

TEST_CASE("shm: large collectives of two groups, waited for in opposite orders") {
  const auto body = [](int rank) {
    constexpr int64_t count = 2000000;  // 8 MB, four rings of slots
    const ProcessGroupPtr groups[] = {new_group({0, 1}, "first"), new_group({0, 1}, "second")};
    at::Tensor tensors[] = {at::full({count}, float(rank)), at::full({count}, float(10 * rank))};
    Pending pending[] = {all_reduce_async(tensors[0], ReduceOp::Sum, groups[0]),
                         all_reduce_async(tensors[1], ReduceOp::Sum, groups[1])};
    pending[rank].wait();
    pending[1 - rank].wait();
    TESSERA_EXPECT(tensors[0].equal(at::full({count}, 1.f)) && tensors[1].equal(at::full({count}, 10.f)));
  };
  run_processes(2, body, kShm);
}

TEST_CASE("shm: more calls in flight than a rank has slots, and one that is never waited for") {
  const auto body = [](int rank) {
    std::vector<at::Tensor> outputs;
    std::vector<Pending> pending;
    for (int i = 0; i < 50; ++i) {
      outputs.push_back(at::zeros({2}));
      pending.push_back(all_gather_async(outputs.back(), at::full({1}, float(100 * rank + i)), default_group()));
    }
    pending[7] = Pending();
    for (size_t i = pending.size(); i-- > 0;) {
      pending[i].wait();
      expect_equal(outputs[i][0].item<float>(), float(i));
      expect_equal(outputs[i][1].item<float>(), float(100 + i));
    }
  };
  run_processes(2, body, kShm);
}

TEST_CASE("shm: a collective that one rank never waits for") {
  check_dropped("shm");
}

TEST_CASE("shm: calls that do not belong together are an error on both ranks") {
  check_calls_that_differ("shm");
}

TEST_CASE("shm: c10d's own all_to_all of tensors that do not fit") {
  check_all_to_all_that_does_not_fit("shm");
}

TEST_CASE("shm: ranks that call different collectives all learn what each of them called") {
  const auto body = [](int rank) {
    at::Tensor tensor = at::zeros({4});
    const auto by_kind = error_of([&] {
      rank == 1 ? broadcast(tensor, 0, default_group()) : all_reduce(tensor, ReduceOp::Sum, default_group());
    });
    TESSERA_EXPECT(by_kind.find("rank 0: all_reduce(Sum, Float[4]); rank 1: broadcast(source 0, Float[4]); rank 2: "
                                "all_reduce(Sum, Float[4])") != std::string::npos);
    expect_throws<CommError>([] { barrier(default_group()); }, "the ranks called different collectives");
    start_shm_anew();
    const auto by_size = error_of([&] { all_reduce(at::zeros({4 + rank}), ReduceOp::Sum, default_group()); });
    TESSERA_EXPECT(by_size.find("rank 1: all_reduce(Sum, Float[5])") != std::string::npos);
    start_shm_anew();
    const auto by_dtype = error_of(
        [&] { all_reduce(at::zeros({4}, rank == 2 ? at::kInt : at::kFloat), ReduceOp::Sum, default_group()); });
    TESSERA_EXPECT(by_dtype.find("rank 2: all_reduce(Sum, Int[4])") != std::string::npos);
    start_shm_anew();
    const auto by_splits = error_of([&] {
      const std::vector<int64_t> in = {1, 1, rank == 0 ? 2 : 1}, out = {1, 1, 1};
      all_to_all(at::zeros({3}), at::zeros({rank == 0 ? 4 : 3}), out, in, default_group());
    });
    TESSERA_EXPECT(by_splits.find("rank 0 sends 2 elements to rank 2, which expects 1") != std::string::npos);
    start_shm_anew();
  };
  run_processes(3, body, kShm);
}

TEST_CASE("shm: a peer that dies in a collective is named by the others within two seconds") {
  check_peer_that_dies("shm", "rank(s) [1] have died", seconds(2));
}

TEST_CASE("shm: a peer that does not come: the time-out is an error with group and collective") {
  check_peer_that_does_not_come("shm");
}

TEST_CASE("shm: a time-out that is too long for the clock") {
  check_longest_time_out("shm");
}

TEST_CASE("shm: a time-out on one rank is an error on those that come later, which names it") {
  const auto body = [](int rank) {
    destroy_process_group();
    init_process_group({.backend = "shm", .timeout = milliseconds(1000)});
    std::this_thread::sleep_for(milliseconds(rank == 1 ? 2000 : 0));
    const std::string error = error_of([] { barrier(default_group()); });
    const bool is_named = error.find(rank == 1 ? "rank 0 failed: barrier() on group 'default' (rank 0 of ranks [0, 1])"
                                               : "rank(s) [1] did not arrive within 1000 ms") != std::string::npos;
    TESSERA_EXPECT(is_named);
    start_shm_anew();
  };
  run_processes(2, body, kShm);
}

TEST_CASE("shm: a peer that has left its group is named at once, and what it sent before arrives") {
  const auto body = [](int rank) {
    at::Tensor gathered = at::zeros({2});
    {
      ProcessGroupPtr pair = new_group({0, 1}, "pair");
      if (rank == 1) {
        all_gather_async(gathered, at::full({1}, 5.f), pair).wait();
      } else {
        std::this_thread::sleep_for(milliseconds(300));
        all_gather(gathered, at::full({1}, 4.f), pair);
        expect_throws<CommError>([&] { barrier(pair); },
                                 "barrier() on group 'pair' (rank 0 of ranks [0, 1]): rank(s) "
                                 "[1] have ended without calling it");
      }
    }
    expect_equal(gathered[1].item<float>(), 5.f);
  };
  run_processes(2, body, kShm);
}

TEST_CASE("shm: a forked child that drops the groups does not leave for its parent") {
  const auto body = [](int rank) {
    if (rank == 1) {
      const pid_t child = fork();
      if (child == 0) {
        destroy_process_group();
        _exit(0);
      }
      int status = -1;
      waitpid(child, &status, 0);
      expect_equal(status, 0);
      std::this_thread::sleep_for(milliseconds(200));  // rank 0 looks after this one meanwhile
    }
    barrier(default_group());
  };
  run_processes(2, body, kShm);
}

// Names of what a rank could have left on the host: shared memory. Other programs, which may run beside this one, have
// folders for their data.
std::set<std::string> names_on_host() {
  std::set<std::string> names;
  for (const char* folder : {"/dev/shm", "/tmp"}) {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
      const std::string name = entry.path().filename();
      if (name.find("tessera_shared") != std::string::npos) {
        names.insert(entry.path());
      }
    }
  }
  return names;
}

TEST_CASE("shm: ranks that are all killed, in set-up or in collectives, leave nothing behind") {
  const std::set<std::string> before = names_on_host();
  for (const int delay_ms : {0, 2, 5, 60}) {
    // "fake": the process comes up without peers, so that the kill may fall into the set-up.
    const auto body = [&](int rank) {
      destroy_process_group();
      std::thread([=] {
        std::this_thread::sleep_for(milliseconds(delay_ms + rank % 2));
        raise(SIGKILL);
      }).detach();
      try {
        init_process_group(ProcessGroupOptions{.backend = "shm"});
        at::Tensor gathered = at::zeros({300000}), own = at::zeros({100000});
        while (true) {
          all_gather(gathered, own, default_group());
        }
      } catch (const CommError&) {  // another rank was killed a moment before this one
        pause();
      }
    };
    const ProcessesResult result = try_run_processes(3, body, {.backend = "fake"});
    CHECK(result.exit_code != 0);
    CHECK_THAT(result.message, ContainsSubstring("killed by signal 9"));
  }
  CHECK(names_on_host() == before);
}

TEST_CASE("shm: what a group opens is closed in the programs that a rank starts") {
  const auto before = tessera::open_files();  // in the ranks, too
  const auto body = [&](int) {
    const ProcessGroupPtr group = new_group({0, 1}, "pair");
    const auto exposed = shared_tensor(kLarge);
    const auto output = at::zeros({2 * kLarge});
    all_gather(output, exposed, group);
    int memories = 0;
    for (const auto& [number, what] : opened_since(before)) {
      memories += what.starts_with("/memfd:") ? 1 : 0;
      const bool is_kept = (fcntl(number, F_GETFD) & FD_CLOEXEC) == 0;
      expect_equal(is_kept ? what : std::string(), std::string());
    }
    TESSERA_EXPECT(memories >= 3);  // of two groups, and of what is exposed
    barrier(group);
  };
  run_processes(2, body, kShm);
}

TEST_CASE("ranks of one host choose shm, for sub-groups too; TESSERA_CPU_BACKEND overrides") {
  const auto body = [](int) {
    expect_equal(get_backend(default_group()), std::string("shm"));
    expect_equal(get_backend(new_group({1, 0}, "pair")), std::string("shm"));
    destroy_process_group();
    setenv("TESSERA_CPU_BACKEND", "gloo", 1);
    init_process_group();
    expect_equal(get_backend(default_group()), std::string("gloo"));
    barrier(default_group());
    destroy_process_group();
    setenv("TESSERA_CPU_BACKEND", "mpi", 1);
    expect_throws<ValueError>([] { init_process_group(); },
                              "TESSERA_CPU_BACKEND=\"mpi\"; allowed are \"gloo\" and \"shm\"");
    setenv("TESSERA_CPU_BACKEND", "shm", 1);
    init_process_group();
    expect_equal(get_backend(default_group()), std::string("shm"));
  };
  run_processes(2, body, {.backend = ""});
}

}  // namespace
}  // namespace tessera::testing
