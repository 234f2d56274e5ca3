// What is shown of a run's cost.

#include "examples/train_gpt/run_cost.h"

#include "third_party/catch2/catch.h"

namespace tessera::examples {
namespace {

constexpr double kMiB = 1 << 20;

TEST_CASE("speed, arithmetic and memory of a run on the CPU") {
  const RunCost cost{.tokens_per_second = 6360, .flops_per_token = 5e6, .ranks = 2, .peak_memory_bytes = 612 * kMiB};
  CHECK(describe(cost) ==
        "training: 6360 tokens/s, 31.8 GFLOP/s of the model, 15.9 GFLOP/s a rank\n"
        "peak memory of a rank: 612 MiB (resident)");
}

TEST_CASE("MFU is that of a rank, and is shown where the peak is known") {
  // Of all ranks 791.2 TFLOP/s, of each of two 395.6, which is 40 % of 989.
  const RunCost cost{.tokens_per_second = 98'900,
                     .flops_per_token = 8e9,
                     .ranks = 2,
                     .peak_memory_bytes = 40'000 * kMiB,
                     .device = at::kCUDA,
                     .peak_tflops = 989};
  CHECK(describe(cost) ==
        "training: 98900 tokens/s, 791.2 TFLOP/s of the model, 395.6 TFLOP/s a rank, MFU 40.0 % of 989 TFLOP/s\n"
        "peak memory of a rank: 40000 MiB (allocated by tensors on the GPU)");
  CHECK(model_flops_utilization(395.6e12, 989) == Catch::Approx(0.4));
}

TEST_CASE("a run that had no step left has no speed") {
  const RunCost cost{.flops_per_token = 5e6, .peak_memory_bytes = 100 * kMiB, .peak_tflops = 1};
  CHECK(describe(cost) ==
        "training: all steps had been made before\n"
        "peak memory of a rank: 100 MiB (resident)");
}

TEST_CASE("the unit of arithmetic follows its size") {
  CHECK(flops_text(67.6e6) == "67.6 MFLOP/s");
  CHECK(flops_text(999.9e6) == "999.9 MFLOP/s");
  CHECK(flops_text(1e9) == "1.0 GFLOP/s");
  CHECK(flops_text(1.3e12) == "1.3 TFLOP/s");
  CHECK(flops_text(1.5e15) == "1500.0 TFLOP/s");
}

}  // namespace
}  // namespace tessera::examples
