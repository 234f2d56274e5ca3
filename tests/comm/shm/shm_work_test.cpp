// c10d's Work over shm, as programs use it that poll.

#include <ATen/ops/full.h>

#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

TEST_CASE("shm: a work whose peer has left is completed without success, one before it with") {
  const auto body = [](int rank) {
    ProcessGroupPtr pair = new_group({0, 1}, "pair");
    if (rank == 0) {
      std::vector<at::Tensor> first = {at::full({2}, 1.f)}, second = {at::full({2}, 1.f)};
      const auto done = pair->getBackend(at::kCPU)->allreduce(first);
      const auto alone = pair->getBackend(at::kCPU)->allreduce(second);
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (!done->isCompleted() || !alone->isCompleted()) {
        TESSERA_EXPECT(std::chrono::steady_clock::now() < end);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      TESSERA_EXPECT(done->isSuccess() && !alone->isSuccess());
      TESSERA_EXPECT(first[0].equal(at::full({2}, 3.f)));
      expect_throws<CommError>([&] { alone->wait(); }, "rank(s) [1] have ended without calling it");
    } else {
      all_reduce(at::full({2}, 2.f), ReduceOp::Sum, pair);
    }
    pair.reset();
    barrier(default_group());
  };
  run_processes(2, body, {.backend = "shm"});
}

}  // namespace
}  // namespace tessera
