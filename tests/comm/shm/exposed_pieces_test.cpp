// Blocks of shared memory that are used again, and reduce-scatters over "shm" of what lies in them.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "comm/shm/shared_memory.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "tests/comm/cases/shared_tensors.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

using std::chrono::milliseconds;

const float* read_place(PeerMemory& memory, const SharedPlace& place) {
  return reinterpret_cast<const float*>(memory.find(place));
}

TEST_CASE("shared blocks: the next tensor of a size has the block of the one before, in another use") {
  PeerMemory memory(getpid());
  auto tensor = shared_tensor(kLarge).fill_(3);
  const auto place = *shared_place(tensor);
  CHECK(read_place(memory, place)[kLarge - 1] == 3);
  CHECK(memory.is_alive(place));
  tensor = at::Tensor();
  CHECK_FALSE(memory.is_alive(place));
  const auto next = shared_tensor(kLarge).fill_(4);
  const auto next_place = *shared_place(next);
  CHECK(next_place.block == place.block);
  CHECK_FALSE(memory.is_alive(place));
  CHECK(memory.is_alive(next_place));
  CHECK(read_place(memory, next_place)[0] == 4);
  CHECK(shared_place(shared_tensor(kLarge))->block != place.block);
  trim_shared_blocks();
}

TEST_CASE("shared blocks: of a peer's those pages are resident that were read") {
  constexpr int64_t kPages = 64, kFloats = kPages * 1024;
  PeerMemory memory(getpid());
  const auto tensor = shared_tensor(kFloats).fill_(3);
  const int64_t before = resident_peer_bytes();
  const float* const found = read_place(memory, *shared_place(tensor));
  float sum = 0;
  for (int64_t page = 0; page < kPages / 2; ++page) {
    sum += found[page * 1024];
  }
  CHECK(sum == 3 * kPages / 2);
  const int64_t read = resident_peer_bytes() - before;
  CHECK(read >= kPages / 2 * 4096);
  CHECK(read <= mapped_peer_bytes());
  trim_shared_blocks();
}

TEST_CASE("shared blocks: free ones are kept up to a quarter more than was in use, the longest free go first") {
  trim_shared_blocks();
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> blocks;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(shared_tensor(kLarge));
    blocks.push_back(shared_place(tensors.back())->block);
  }
  tensors.clear();  // all four are free
  {
    const auto other = shared_tensor(3 * kLarge);  // with which they are seven, of at most five
  }
  std::vector<int64_t> again;
  for (int i = 0; i < 2; ++i) {
    tensors.push_back(shared_tensor(kLarge));
    again.push_back(shared_place(tensors.back())->block);
  }
  CHECK(again == std::vector<int64_t>{blocks[3], blocks[2]});
  CHECK(shared_place(shared_tensor(kLarge))->block > blocks[3]);
  tensors.clear();
  trim_shared_blocks();
  CHECK(shared_place(shared_tensor(kLarge))->block > blocks[3]);
  trim_shared_blocks();
}

TEST_CASE("shared blocks: a child neither uses its parent's free blocks nor frees those in use") {
  auto tensor = shared_tensor(kLarge).fill_(5);
  const auto free_block = shared_place(shared_tensor(2 * kLarge).fill_(6))->block;
  const pid_t child = fork();
  if (child == 0) {
    tensor = at::Tensor();
    const auto own = shared_tensor(2 * kLarge).fill_(7);
    PeerMemory memory(getpid());
    const bool is_right = read_place(memory, *shared_place(own))[kLarge] == 7;
    trim_shared_blocks();
    _exit(is_right ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(tensor[kLarge - 1].item<float>() == 5);
  const auto next = shared_tensor(2 * kLarge);
  CHECK(shared_place(next)->block == free_block);
  CHECK(next[kLarge].item<float>() == 6);
  trim_shared_blocks();
}

/// What rank `rank` sends in a round, from element `begin` on; small integers, so that sums are exact.
at::Tensor small_integers(int64_t numel, int64_t rank, int round, int64_t begin = 0) {
  return (at::arange(begin, begin + numel, c10::kFloat) + static_cast<float>(1000 * rank + round)).remainder(4096);
}

at::Tensor sums(int64_t numel, int round) {
  const int64_t own = numel / get_world_size();
  auto sum = at::zeros({own});
  for (int64_t rank = 0; rank < get_world_size(); ++rank) {
    sum += small_integers(own, rank, round, get_rank() * own);
  }
  return sum;
}

TEST_CASE("shm: gradients that the others read where they are, gone at once, by ranks of different speed") {
  for (const int world_size : {2, 3, 4}) {
    const auto body = [](int rank) {
      // All ranks expose inputs, or only one.
      for (const bool only_first : {false, true}) {
        for (const int64_t each : {int64_t{1000}, kLarge, 7 * kLarge}) {
          const int64_t numel = each * get_world_size();
          const auto output = at::zeros({each});
          for (int round = 0; round < 6; ++round) {
            auto input = rank == 0 || !only_first ? shared_tensor(numel) : at::zeros({numel});
            input.copy_(small_integers(numel, rank, round));
            if ((round + rank) % 3 == 0) {
              std::this_thread::sleep_for(milliseconds(5));
            }
            auto pending =
                reduce_scatter_segments_async(output, one_part(std::move(input)), ReduceOp::Sum, default_group());
            pending.wait();
            const auto next = shared_tensor(numel).fill_(-1);
            TESSERA_EXPECT(output.equal(sums(numel, round)));
          }
        }
      }
      barrier(default_group());
    };
    run_processes(world_size, body, kShm);
  }
}

TEST_CASE("shm: a gradient is kept until the others have read it, also when this rank has its own") {
  // So little that a rank can put it all, and be stopped before it takes anything.
  constexpr int64_t kNumel = 2 * 8192;
  const auto body = [](int rank) {
    const int peer = pid_of(1 - rank);
    auto input = shared_tensor(kNumel).copy_(small_integers(kNumel, rank, 0));
    const auto block = shared_place(input)->block;
    const auto output = at::zeros({kNumel / 2});
    if (rank == 0) {
      await_stop(peer);
    }
    auto pending = reduce_scatter_segments_async(output, one_part(std::move(input)), ReduceOp::Sum, default_group());
    if (rank == 1) {
      raise(SIGSTOP);
      pending.wait();
    } else {
      pending.wait();
      TESSERA_EXPECT(shared_place(shared_tensor(kNumel).fill_(-1))->block != block);
      kill(peer, SIGCONT);
      pending.wait_for_readers();
      TESSERA_EXPECT(shared_place(shared_tensor(kNumel))->block == block);
    }
    TESSERA_EXPECT(output.equal(sums(kNumel, 0)));
  };
  run_processes(2, body, kShm);
}

TEST_CASE("shm: a rank that ends the group while its gradient is read is an error on the others") {
  constexpr int64_t kNumel = 2 * 8192;
  const auto body = [](int rank) {
    auto group = new_group({0, 1}, "pair");
    const auto output = at::zeros({kNumel / 2});
    auto input = shared_tensor(kNumel).fill_(1);
    if (rank == 1) {
      { const auto pending = reduce_scatter_segments_async(output, one_part(input), ReduceOp::Sum, group); }
      group.reset();
      input = at::Tensor();
      barrier(default_group());
      return;
    }
    barrier(default_group());
    auto pending = reduce_scatter_segments_async(output, one_part(input), ReduceOp::Sum, group);
    expect_throws<CommError>([&] { pending.wait(); }, "a peer has ended the group before its input was read");
  };
  run_processes(2, body, kShm);
}

}  // namespace
}  // namespace tessera::testing
