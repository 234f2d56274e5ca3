// Memory that peers read where it is: the memory itself, and all-gathers of it over "shm".

#include "comm/shm/shared_memory.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "comm/shm/file_memory.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "tests/comm/cases/shared_tensors.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

using std::chrono::milliseconds;

const float* read_own(PeerMemory& memory, const at::Tensor& tensor) {
  return reinterpret_cast<const float*>(memory.find(*shared_place(tensor)));
}

TEST_CASE("shared memory: zeros, which peers find with their present values until the tensor goes") {
  PeerMemory memory(getpid());
  auto tensor = shared_zeros(1000, c10::kFloat);
  CHECK(tensor.equal(at::zeros({1000})));
  const auto place = *shared_place(tensor);
  const float* const found = read_own(memory, tensor);
  CHECK(found != tensor.const_data_ptr<float>());
  tensor.fill_(3);
  CHECK(found[999] == 3);
  CHECK(read_own(memory, tensor.narrow(0, 10, 5)) == found + 10);
  CHECK(memory.is_alive(place));

  const int64_t mapped = mapped_peer_bytes();
  CHECK(mapped >= 4000);
  tensor = at::Tensor();
  CHECK_FALSE(memory.is_alive(place));
  CHECK(found[999] == 0);  // the page went back to the system
  const auto next = shared_zeros(1000, c10::kFloat);
  CHECK(shared_place(next)->block != place.block);
  read_own(memory, next);
  CHECK(mapped_peer_bytes() == mapped);  // the old block is not mapped any more
}

TEST_CASE("shared memory: where stdout is closed, it does not become that") {
  const int standard = dup(STDOUT_FILENO);
  close(STDOUT_FILENO);
  const FileDescriptor file = FileDescriptor::in_memory("test");
  const FileDescriptor again = FileDescriptor::open_own("opening", file.path());
  const bool is_closed = fcntl(STDOUT_FILENO, F_GETFD) == -1;
  dup2(standard, STDOUT_FILENO);
  close(standard);
  CHECK(is_closed);
  CHECK(file.number() > STDERR_FILENO);
  CHECK(again.number() > STDERR_FILENO);
}

TEST_CASE("shared memory: other tensors have no place in it") {
  CHECK_FALSE(shared_place(at::zeros({10})));
  CHECK_FALSE(shared_place(shared_zeros(10, c10::kFloat).clone()));
  CHECK(shared_zeros(0, c10::kDouble).numel() == 0);
}

TEST_CASE("shared memory: what a child does to what it inherits is its own affair") {
  auto tensor = shared_zeros(1000, c10::kFloat).fill_(5);
  const pid_t child = fork();
  if (child == 0) {
    const bool is_known = shared_place(tensor).has_value();
    tensor = at::Tensor();
    const auto own = shared_zeros(1000, c10::kFloat).fill_(7);
    PeerMemory memory(getpid());
    _exit(!is_known && read_own(memory, own)[999] == 7 ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(tensor[999].item<float>() == 5);
}

at::Tensor input_of(int64_t numel, bool is_shared) {
  return is_shared ? shared_zeros(numel, c10::kFloat) : at::zeros({numel});
}

/// What a rank sends in a round.
at::Tensor numbers(int64_t numel, int64_t rank, int round) {
  return at::arange(numel, c10::kFloat) + static_cast<float>(1000 * rank + round);
}

/// Whether each rank's part of the output is what it has sent in `round`.
bool is_from_round(const at::Tensor& output, int round) {
  const int64_t numel = output.numel() / get_world_size();
  bool equal = true;
  for (int64_t rank = 0; rank < get_world_size(); ++rank) {
    equal = equal && output.narrow(0, rank * numel, numel).equal(numbers(numel, rank, round));
  }
  return equal;
}

TEST_CASE("shm: inputs that the others read where they are, written again at once by ranks of different speed") {
  for (const int world_size : {2, 3, 4}) {
    const auto body = [](int rank) {
      const auto& group = default_group();
      // All ranks expose inputs, or only one.
      for (const bool only_first : {false, true}) {
        for (const int64_t numel : {int64_t{1}, int64_t{1000}, kLarge, 7 * kLarge}) {
          const auto input = input_of(numel, rank == 0 || !only_first);
          const auto output = at::zeros({get_world_size() * numel});
          for (int round = 0; round < 6; ++round) {
            input.copy_(numbers(numel, rank, round));
            if ((round + rank) % 3 == 0) {
              std::this_thread::sleep_for(milliseconds(5));
            }
            if (round % 2 == 0) {
              all_gather(output, input, group);
            } else {
              // In half of them what is read is cast.
              const auto parts = round % 4 == 1 ? output.to(c10::kDouble) : output;
              auto pending = all_gather_segments_async(one_part(parts), input, group);
              pending.wait();
              pending.wait_for_readers();
              output.copy_(parts);
            }
            input.fill_(-1);
            TESSERA_EXPECT(is_from_round(output, round));
          }
        }
      }
    };
    run_processes(world_size, body, kShm);
  }
}

TEST_CASE("shm: an output is there before the others have read the input, which is theirs until then") {
  const auto body = [](int rank) {
    const int peer = pid_of(1 - rank);
    const auto input = zeros_to_gather(kLarge, c10::kFloat, default_group());
    input.copy_(numbers(kLarge, rank, 0));
    const auto output = at::zeros({2 * kLarge});
    if (rank == 0) {
      await_stop(peer);  // it has called, and cannot have read what is exposed only now
    }
    auto pending = all_gather_segments_async(one_part(output), input, default_group());
    if (rank == 1) {
      raise(SIGSTOP);
      pending.wait();
    } else {
      pending.wait();
      TESSERA_EXPECT(is_from_round(output, 0));
      kill(peer, SIGCONT);
      pending.wait_for_readers();
      input.fill_(-1);
    }
    TESSERA_EXPECT(is_from_round(output, 0));
  };
  run_processes(2, body, kShm);
}

TEST_CASE("shm: memory for small inputs is plain, for larger ones such as peers read") {
  const auto body = [](int) {
    const auto is_shared = [](int64_t numel, c10::ScalarType dtype) {
      return shared_place(zeros_to_gather(numel, dtype, default_group())).has_value();
    };
    TESSERA_EXPECT(!is_shared((1 << 14) - 1, c10::kFloat));
    TESSERA_EXPECT(is_shared(1 << 14, c10::kFloat));
    TESSERA_EXPECT(!is_shared(1 << 14, c10::kBFloat16));
    TESSERA_EXPECT(is_shared(1 << 13, c10::kDouble));
  };
  run_processes(2, body, kShm);
}

TEST_CASE("shm: one input after the other; those that are gone are not kept mapped") {
  const auto body = [](int) {
    for (int i = 0; i < 20; ++i) {
      const auto input = shared_zeros(kLarge, c10::kFloat);
      const auto output = at::zeros({2 * kLarge});
      all_gather(output, input, default_group());
      TESSERA_EXPECT(mapped_peer_bytes() < 3 * kLarge * 4);
    }
  };
  run_processes(2, body, kShm);
}

TEST_CASE("shm: a rank that frees what it has exposed and ends the group is an error on the others") {
  const auto body = [](int rank) {
    auto group = new_group({0, 1}, "pair");
    auto input = shared_zeros(kLarge, c10::kFloat).fill_(1);
    const auto output = at::zeros({2 * kLarge});
    if (rank == 1) {
      { const auto pending = all_gather_segments_async(one_part(output), input, group); }
      group.reset();
      input = at::Tensor();
      barrier(default_group());
      return;
    }
    barrier(default_group());
    auto pending = all_gather_segments_async(one_part(output), input, group);
    expect_throws<CommError>([&] { pending.wait(); }, "a peer has ended the group before its input was read");
  };
  run_processes(2, body, kShm);
}

TEST_CASE("shm: a rank that ends its group waits for who has yet to read what it has exposed, and still runs") {
  const auto body = [](int rank) {
    signal(SIGTERM, SIG_IGN);
    for (const int last_signal : {SIGCONT, SIGKILL}) {
      const int peer = pid_of(1 - rank);
      auto group = new_group({0, 1}, "pair");
      auto input = shared_zeros(kLarge, c10::kFloat).copy_(numbers(kLarge, rank, 0));
      const auto output = at::zeros({2 * kLarge});
      if (rank == 0) {
        await_stop(peer);
      }
      auto pending = all_gather_segments_async(one_part(output), input, group);
      if (rank == 1) {
        raise(SIGSTOP);
      }
      pending.wait();
      TESSERA_EXPECT(is_from_round(output, 0));
      std::thread later([=] {
        std::this_thread::sleep_for(milliseconds(rank == 0 ? 300 : 0));
        rank == 0 ? kill(peer, last_signal) : 0;
      });
      pending = Pending();
      input = at::Tensor();
      group.reset();
      later.join();
    }
    std::fprintf(stderr, "ended it\n");
  };
  const ProcessesResult result = try_run_processes(2, body, kShm);
  CHECK(result.exit_code == 128 + SIGKILL);
  CHECK_THAT(result.outputs[0], Catch::Matchers::ContainsSubstring("ended it"));
}

struct ExposedCall {
  at::Tensor input;
  Pending pending;
  int peer;
};

/// A gather over a new default group with a time-out of a second. Rank 1 is stopped before it waits, until rank 0,
/// whose wait is over, lets it go on.
ExposedCall expose_to_a_stopped_rank(int rank) {
  destroy_process_group();
  init_process_group({.backend = "shm", .timeout = milliseconds(1000)});
  ExposedCall exposed{.input = shared_zeros(kLarge, c10::kFloat), .pending = {}, .peer = pid_of(1 - rank)};
  const auto output = at::zeros({2 * kLarge});
  if (rank == 0) {
    await_stop(exposed.peer);
  }
  exposed.pending = all_gather_segments_async(one_part(output), exposed.input, default_group());
  if (rank == 1) {
    raise(SIGSTOP);
  } else {
    exposed.pending.wait();
  }
  return exposed;
}

TEST_CASE("shm: who reads what was exposed after its owner had an error has one too") {
  const auto body = [](int rank) {
    auto [input, pending, peer] = expose_to_a_stopped_rank(rank);
    if (rank == 1) {
      expect_throws<CommError>([&pending = pending] { pending.wait(); }, "rank 0 failed: all_gather(Float[100003])");
    } else {
      expect_throws<CommError>([&pending = pending] { pending.wait_for_readers(); },
                               "rank(s) [1] did not arrive within 1000 ms");
      input.fill_(-1);
      kill(peer, SIGCONT);
    }
    // run_processes ends with a barrier, for which a group that failed is no good.
    destroy_process_group();
    init_process_group({.backend = "shm"});
  };
  run_processes(2, body, kShm);
}

TEST_CASE("shm: who reads what was exposed after its owner gave up waiting, and ended the group, has an error") {
  const auto body = [](int rank) {
    auto [input, pending, peer] = expose_to_a_stopped_rank(rank);
    if (rank == 1) {
      expect_throws<CommError>([&pending = pending] { pending.wait(); },
                               "rank 0 has ended the group before its input was read");
      destroy_process_group();
    } else {
      pending = Pending();
      destroy_process_group();  // returns when the time is up
      input.fill_(-1);
      kill(peer, SIGCONT);
    }
    init_process_group({.backend = "shm"});
  };
  run_processes(2, body, kShm);
}

TEST_CASE("shm: a peer that dies before it has read is named") {
  const auto body = [](int rank) {
    signal(SIGTERM, SIG_IGN);
    const int peer = pid_of(1 - rank);
    const auto input = shared_zeros(kLarge, c10::kFloat);
    const auto output = at::zeros({2 * kLarge});
    if (rank == 0) {
      await_stop(peer);
    }
    auto pending = all_gather_segments_async(one_part(output), input, default_group());
    if (rank == 1) {
      raise(SIGSTOP);
    }
    pending.wait();
    kill(peer, SIGKILL);
    expect_throws<CommError>([&] { pending.wait_for_readers(); }, "rank(s) [1] have died");
    std::fprintf(stderr, "had the error\n");
  };
  const ProcessesResult result = try_run_processes(2, body, kShm);
  CHECK(result.exit_code == 128 + SIGKILL);
  CHECK_THAT(result.outputs[0], Catch::Matchers::ContainsSubstring("had the error"));
}

}  // namespace
}  // namespace tessera::testing
