// The loss of an output layer over a large vocabulary, forward and backward, in float32 on one thread.
//
//   <rows>x<vocabulary>/fused_ms        linear_cross_entropy (parallel/linear_cross_entropy.h)
//   <rows>x<vocabulary>/plain_ms        at::linear, then cross_entropy
//   <rows>x<vocabulary>/time_ratio      fused / plain
//   <rows>x<vocabulary>/fused_mib       peak memory in addition to the operands
//   <rows>x<vocabulary>/plain_mib
//
// Both alternate, and the fastest round counts. Features: 768.

#include "parallel/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>

#include "benchmarks/measure.h"

namespace tessera {
namespace {

constexpr int64_t kFeatures = 768;
constexpr double kMiB = 1 << 20;

double peak_of(const std::function<void()>& call) {
  const double start = reset_peak();
  call();
  return (peak_bytes() - start) / kMiB;
}

void compare(int64_t rows, int64_t vocabulary, const BenchmarkOptions& options) {
  const auto input = at::randn({rows, kFeatures}).set_requires_grad(true);
  const auto weight = (at::randn({vocabulary, kFeatures}) * 0.02).set_requires_grad(true);
  const auto target = at::randint(vocabulary, {rows}, at::kLong);
  const auto step = [&](const auto& loss) {
    return [&, loss] {
      input.mutable_grad().reset();
      weight.mutable_grad().reset();
      loss().backward();
    };
  };
  const std::function<void()> fused = step([&] { return linear_cross_entropy(input, weight, target); });
  const std::function<void()> plain = step([&] { return at::cross_entropy_loss(at::linear(input, weight), target); });
  const double fused_mib = peak_of(fused), plain_mib = peak_of(plain);
  const auto us = microseconds({fused, plain}, wall_us, options.rounds, /*steps=*/1);
  const auto prefix = fmt::format("{}x{}", rows, vocabulary);
  print_result(prefix + "/fused_ms", us[0] / 1e3, "ms", {}, options.json);
  print_result(prefix + "/plain_ms", us[1] / 1e3, "ms", {}, options.json);
  print_result(prefix + "/time_ratio", us[0] / us[1], "x", {}, options.json);
  print_result(prefix + "/fused_mib", fused_mib, "MiB", {}, options.json);
  print_result(prefix + "/plain_mib", plain_mib, "MiB", {}, options.json);
}

void run(const BenchmarkOptions& options) {
  compare(2048, 32000, options);
  compare(1024, 128000, options);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::benchmark_main(argc, argv,
                                 {.name = "linear_cross_entropy",
                                  .description = "An output layer's loss with and without whole logits.",
                                  .rounds = 5,
                                  .run = tessera::run});
}
