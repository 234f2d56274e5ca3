#include "debug/step_meter.h"

#include <ATen/ops/ones.h>

#include <chrono>
#include <cmath>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/collectives.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

void sleep_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

}  // namespace

TEST_CASE("a step's time is told by part, and its bytes by group") {
  run_ranks(2, [](int rank) {
    const auto group = new_group({0, 1}, "dp");
    const auto x = at::ones({4});
    barrier(group);
    StepMeter meter;
    for (int step = 0; step < 2; ++step) {
      {
        const auto timed = meter.time(StepPart::Data);
        sleep_ms(20);
      }
      {
        const auto timed = meter.time(StepPart::Unmetered);
        all_reduce(x, ReduceOp::Sum, group);
        sleep_ms(50);
      }
      {
        const auto timed = meter.time(StepPart::Checkpoint);
        barrier(group);  // whose wait is the checkpoint's
        sleep_ms(10);
      }
      if (rank == 0) {
        sleep_ms(40);  // rank 1 waits for it
      }
      all_reduce(x, ReduceOp::Sum, group);
      meter.end_step();
    }
    const auto report = meter.read();
    expect_equal(report.steps, int64_t{2});
    expect_equal(report.bytes_sent.at("dp"), 16.0);
    expect_equal(report.data >= 0.02, true);
    expect_equal(report.checkpoint >= 0.01, true);
    expect_equal((rank == 0 ? report.compute : report.communication) >= 0.035, true);
    expect_equal(rank == 0 ? report.communication < 0.03 : report.compute < 0.03, true);
    expect_equal(
        std::abs(report.compute + report.communication + report.data + report.checkpoint - report.seconds) < 1e-9,
        true);
    sleep_ms(5);
    meter.end_step();
    const auto next = meter.read();
    expect_equal(next.steps, int64_t{1});
    expect_equal(next.bytes_sent.at("dp"), 0.0);
    expect_equal(next.data, 0.0);
  });
}

}  // namespace tessera
