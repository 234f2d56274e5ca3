// What overlapping a column-wise layer's collectives with its products saves:
// `./bazelw run //benchmarks:overlap`.
//
// Forward and backward of a block of two layers, 512 → 2048 (column-wise) → 512 (row-wise), on a sequence of 256
// positions that 2 ranks cut, one thread each. With and without ColwiseParallel's overlap, taking turns:
//
//   overlap/BACKEND_without_ms
//   overlap/BACKEND_with_ms

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>

#include <functional>
#include <string>

#include "benchmarks/measure.h"
#include "device_mesh/device_mesh.h"
#include "nn/hooks/hooked.h"
#include "nn/linear.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"

namespace tessera {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kPositions = 256, kDim = 512, kHidden = 4 * kDim;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    up = register_module("up", nn::Linear(kDim, kHidden));
    down = register_module("down", nn::Linear(kHidden, kDim));
  }
  at::Tensor forward(at::Tensor x) { return down(up(x).relu()); }
  nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(Block);

std::function<void()> make_step(const DeviceMesh& tp, bool overlap) {
  Block block;
  parallelize_module(
      block, tp,
      {{"up", ColwiseParallel(
                  {.input_layouts = Shard(1), .use_local_output = true, .even_shards = true, .overlap = overlap})},
       {"down", RowwiseParallel({.output_layouts = Shard(1)})}});
  const auto input = at::randn({1, kPositions / kRanks, kDim}).requires_grad_();
  return [block, input]() mutable {
    block->zero_grad();
    block(input).sum().backward();
  };
}

Results measure(const BenchmarkOptions& options) {
  const auto tp = init_device_mesh(at::kCPU, {kRanks}, {"tp"});
  const auto times = microseconds({make_step(tp, false), make_step(tp, true)}, wall_us, options.rounds);
  return {{"without_ms", times[0] / 1e3}, {"with_ms", times[1] / 1e3}};
}

void run(const BenchmarkOptions& options) {
  for (const std::string backend : {"gloo", "shm", "threads"}) {
    const auto results =
        backend == "threads" ? thread_ranks(kRanks, [&] { return measure(options); }) : launch_ranks(kRanks, backend);
    for (const std::string name : {"without_ms", "with_ms"}) {
      print_result(fmt::format("overlap/{}_{}", backend, name), results.at(name), "ms", {}, options.json);
    }
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::benchmark_main(
      argc, argv,
      {.name = "overlap",
       .description = "What overlapping a column-wise layer's collectives with its products saves.",
       .run = tessera::run,
       .on_rank = tessera::measure});
}
