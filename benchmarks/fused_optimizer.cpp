// Cost of libtorch's fused optimizer steps on sharded parameters: `./bazelw run //benchmarks:fused_optimizer`.
//
//   fused_adamw/192_small_us      CPU time of at::_fused_adamw_ on 192 DTensors with local tensors of 8 x 16
//   fused_adamw/192_small_ratio   that divided by its time on plain tensors of the local sizes
//   fused_adamw/4_large_us, _ratio   the same for 4 DTensors with local tensors of 512 x 1024; likewise fused_sgd

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "benchmarks/measure.h"
#include "comm/context/rank_context.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"

namespace tessera {
namespace {

/// Tensors of a fused optimizer step.
struct OptimizerTensors {
  std::vector<at::Tensor> params, grads, averages, squares, steps;

  /// Makes `count` parameters with local tensors of these sizes: plain, or rows of DTensors on `mesh`.
  OptimizerTensors(int count, at::IntArrayRef sizes, const DeviceMesh* mesh) {
    for (int i = 0; i < count; ++i) {
      for (auto* list : {&params, &grads, &averages, &squares}) {
        const auto local = at::rand(sizes);
        list->push_back(mesh ? from_local(local, *mesh, {Shard(0)}) : local);
      }
      steps.push_back(at::zeros({}));
    }
  }
  void adamw() const {
    at::_fused_adamw_(params, grads, averages, squares, {}, steps, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
  }
  void sgd() const { at::_fused_sgd_(params, grads, averages, 0.01, 0.9, 1e-3, 0.0, false, false, false); }
};

/// Many small parameters, dominated by overhead, and few large ones.
void run(const BenchmarkOptions& options) {
  const at::NoGradGuard no_grad;  // as optimizers call them
  const RankContextGuard guard(RankContext::create());
  init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  const auto mesh = init_device_mesh(at::kCPU, {2});
  struct Case {
    const char* name;
    int count;
    std::vector<int64_t> local_sizes;
  };
  for (const auto& [name, count, sizes] : {Case{"192_small", 192, {8, 16}}, Case{"4_large", 4, {512, 1024}}}) {
    const OptimizerTensors plain(count, sizes, nullptr), sharded(count, sizes, &mesh);
    const auto times =
        microseconds({[&] { plain.adamw(); }, [&] { sharded.adamw(); }, [&] { plain.sgd(); }, [&] { sharded.sgd(); }},
                     cpu_us, 10 * options.rounds);
    for (const size_t i : {0, 2}) {
      const auto test = fmt::format("{}/{}", i == 0 ? "fused_adamw" : "fused_sgd", name);
      print_result(test + "_us", times[i + 1], "us", {}, options.json);
      print_result(test + "_ratio", times[i + 1] / times[i], "x", {}, options.json);
    }
  }
  destroy_process_group();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::benchmark_main(
      argc, argv,
      {.name = "fused_optimizer",
       .description = "What libtorch's fused AdamW and SGD cost on sharded parameters, beside plain tensors.",
       .run = tessera::run});
}
