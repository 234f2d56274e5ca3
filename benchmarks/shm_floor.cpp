#include "benchmarks/shm_floor.h"

#include <c10/util/Exception.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "comm/backend/stream_copy.h"

namespace tessera {

namespace {

class Barrier {
 public:
  void wait(uint32_t ranks) {
    const uint32_t generation = generation_.load();
    if (arrived_.fetch_add(1) + 1 == ranks) {
      arrived_ = 0;
      generation_.fetch_add(1);
      syscall(SYS_futex, &generation_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
      return;
    }
    for (int i = 0; i < 2000 && generation_.load() == generation; ++i) {
#ifdef __SSE2__
      __builtin_ia32_pause();
#else
      std::this_thread::yield();
#endif
    }
    while (generation_.load() == generation) {
      syscall(SYS_futex, &generation_, FUTEX_WAIT, generation, nullptr, nullptr, 0);
    }
  }

 private:
  std::atomic<uint32_t> arrived_{0};
  std::atomic<uint32_t> generation_{0};
};

struct Shared {
  Barrier barrier;
  FloorTimes times;
};

double fastest_us(int rounds, int calls, const std::function<void()>& call) {
  double best = 1e30;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) {
      call();
    }
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    best = std::min(best, time.count() / calls);
  }
  return best;
}

// Number of floats for which the running sum stays in the first-level cache.
constexpr size_t kBlock = 2048;

void add(float* __restrict to, const float* __restrict terms, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    to[i] += terms[i];
  }
}

// `arena` has `bytes` per rank.
FloorTimes measure_as_rank(int rank, int ranks, size_t bytes, int rounds, Shared& shared, char* arena) {
  std::vector<char> output(bytes * ranks, 1), own(bytes, 1);
  std::vector<float> sum(bytes / sizeof(float), 1.f);
  std::memset(arena + rank * bytes, 0, bytes);
  const int calls = bytes > 1000000 ? 4 : 500;
  FloorTimes times;
  const auto gather_us = [&](void (*copy)(void*, const void*, size_t)) {
    return fastest_us(rounds, calls, [&] {
      shared.barrier.wait(ranks);
      for (int from = 0; from < ranks; ++from) {
        copy(output.data() + from * bytes, arena + from * bytes, bytes);
      }
      shared.barrier.wait(ranks);
    });
  };
  const auto plain_copy = [](void* to, const void* from, size_t size) { std::memcpy(to, from, size); };
  times.all_gather_plain = gather_us(plain_copy);
  times.all_gather_streamed = gather_us(stream_copy);
  const size_t count = sum.size() / ranks;
  times.reduce_scatter = fastest_us(rounds, calls, [&] {
    shared.barrier.wait(ranks);
    for (size_t begin = 0; begin < count; begin += kBlock) {
      const size_t size = std::min(kBlock, count - begin);
      float* const block = sum.data() + begin;
      for (int from = 0; from < ranks; ++from) {
        const auto* terms = reinterpret_cast<const float*>(arena + from * bytes) + rank * count + begin;
        from == 0 ? static_cast<void>(std::copy_n(terms, size, block)) : add(block, terms, size);
      }
    }
    shared.barrier.wait(ranks);
  });
  if (rank == 0) {
    times.copy = fastest_us(rounds, calls, [&] {
      for (int from = 0; from < ranks; ++from) {
        std::memcpy(output.data() + from * bytes, own.data(), bytes);
      }
    });
  }
  return times;
}

}  // namespace

FloorTimes measure_shm_floor(int ranks, size_t bytes, int rounds) {
  constexpr size_t kHead = 4096;
  const size_t size = kHead + ranks * bytes;
  void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "no ", size, " bytes of shared memory");
  auto* const shared = new (memory) Shared();
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    TORCH_CHECK(child >= 0, "fork failed");
    if (child == 0) {
      const FloorTimes times = measure_as_rank(rank, ranks, bytes, rounds, *shared, static_cast<char*>(memory) + kHead);
      if (rank == 0) {
        shared->times = times;
      }
      _exit(0);
    }
  }
  for (int rank = 0; rank < ranks; ++rank) {
    wait(nullptr);
  }
  const FloorTimes times = shared->times;
  munmap(memory, size);
  return times;
}

}  // namespace tessera
