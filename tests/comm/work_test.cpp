// c10d's Work, as programs use it that poll or have a time-out of their own.

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using C10dWorkPtr = c10::intrusive_ptr<c10d::Work>;
using Clock = std::chrono::steady_clock;

void poll(const C10dWorkPtr& work) {
  for (const auto end = Clock::now() + std::chrono::seconds(30); !work->isCompleted();) {
    TESSERA_EXPECT(Clock::now() < end);
    std::this_thread::yield();
  }
}

c10::intrusive_ptr<c10d::Backend> backend() {
  return default_group()->getBackend(at::kCPU);
}

TEST_CASE("a work is completed when all ranks have called, and not before") {
  std::promise<void> launched;
  run_ranks(2, [&](int rank) {
    std::vector<at::Tensor> tensors = {at::full({3}, 1.f + rank)};
    if (rank == 1) {
      launched.get_future().wait_for(std::chrono::seconds(30));
    }
    const C10dWorkPtr work = backend()->allreduce(tensors);
    if (rank == 0) {
      TESSERA_EXPECT(!work->isCompleted() && !work->isSuccess());
      launched.set_value();
    }
    poll(work);
    TESSERA_EXPECT(work->isSuccess() && tensors[0].equal(at::full({3}, 3.f)));
    work->wait();
    TESSERA_EXPECT(work->isCompleted() && work->isSuccess());
  });
}

TEST_CASE("works of lists are completed, and their outputs there, when those of the parts are") {
  run_ranks(2, [](int rank) {
    std::vector<std::vector<at::Tensor>> lists = {{at::zeros({2}), at::zeros({2})}};
    std::vector<at::Tensor> input = {at::full({2}, 5.f + rank)};
    const C10dWorkPtr gather = backend()->allgather(lists, input);
    poll(gather);
    TESSERA_EXPECT(gather->isSuccess());
    TESSERA_EXPECT(lists[0][0].equal(at::full({2}, 5.f)) && lists[0][1].equal(at::full({2}, 6.f)));
    std::vector<at::Tensor> tensors = {at::full({2}, 1.f + rank), at::full({3}, 2.f)};
    const C10dWorkPtr reductions = backend()->allreduce_coalesced(tensors);
    poll(reductions);
    TESSERA_EXPECT(reductions->isSuccess());
    TESSERA_EXPECT(tensors[0].equal(at::full({2}, 3.f)) && tensors[1].equal(at::full({3}, 4.f)));
  });
}

TEST_CASE("a work that failed is completed without success, and says why as often as it is asked") {
  run_ranks(2, [](int rank) {
    std::vector<std::vector<at::Tensor>> lists = {{at::zeros({2 + rank}), at::zeros({2 + rank})}};
    std::vector<at::Tensor> input = {at::zeros({2 + rank})};
    const C10dWorkPtr gather = backend()->allgather(lists, input);
    poll(gather);
    TESSERA_EXPECT(!gather->isSuccess());
    for (int i = 0; i < 2; ++i) {
      expect_throws<CommError>([&] { gather->wait(); }, rank == 0 ? "all_gather(Float[2]) on group 'default'"
                                                                  : "all_gather(Float[3]) on group 'default'");
    }
  });
}

TEST_CASE("wait() has the time-out that it is given") {
  std::promise<void> timed_out;
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      const C10dWorkPtr work = backend()->barrier();
      expect_throws<CommError>([&] { work->wait(std::chrono::milliseconds(50)); },
                               "rank(s) [1] did not arrive within 50 ms");
      TESSERA_EXPECT(work->isCompleted() && !work->isSuccess());
      timed_out.set_value();
    } else {
      timed_out.get_future().wait_for(std::chrono::seconds(30));
      expect_throws<CommError>([] { barrier(default_group()); }, "rank 0 failed: barrier() on group 'default'");
    }
  });
}

}  // namespace
}  // namespace tessera
