// Cost of a step under tensor parallelism and fully_shard together: `./bazelw run //benchmarks:two_d_step`.
//
// The model is the stack of three Mlps 64 → 192, 256, 192 → 64, on 8 rows per rank; forward, backward and Adam.
//
//   two_d/threads_step_ms   2 fully_shard x 2 tensor-parallel ranks that are threads
//   two_d/shm_step_ms       the same on 4 processes over shm
//   two_d/gloo_step_ms      the same on 4 processes over gloo
//   tp/threads_step_ms      2 tensor-parallel ranks alone
//   dp/threads_step_ms      2 ranks of fully_shard alone
//   two_d/host_us           CPU time of forward and backward of one rank of two_d over the fake backend, which moves no
//                           data, minus that of the plain model
//   plain/step_ms           the plain model in one process
//
// If PEER_PYTHON names a Python with torch, two_d_step_peer.py measures the same there, over gloo, which is also the
// peer of shm_step_ms.

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <torch/optim/adam.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "benchmarks/measure.h"
#include "comm/context/rank_context.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "nn/hooks/hooked.h"
#include "nn/linear.h"
#include "nn/sequential.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"

namespace tessera {
namespace {

constexpr int64_t kDim = 64, kRows = 8;

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t multiplier) {
    in_proj = register_module("in_proj", nn::Linear(kDim, multiplier * kDim));
    out_proj = register_module("out_proj", nn::Linear(multiplier * kDim, kDim));
  }
  at::Tensor forward(at::Tensor x) { return out_proj(in_proj(x).relu()).relu(); }
  nn::Linear in_proj{nullptr}, out_proj{nullptr};
};
TESSERA_MODULE(Mlp);

nn::Sequential make_stack() {
  nn::Sequential stack;
  for (const int64_t multiplier : {3, 4, 3}) {
    stack->push_back(Mlp(multiplier));
  }
  return stack;
}

void parallelize(nn::Sequential& stack, const DeviceMesh& tp) {
  const ColwiseParallel columns;
  const RowwiseParallel rows({.use_local_output = false});
  parallelize_module(stack, tp, {{"*.in_proj", columns}, {"[01].out_proj", rows}, {"2.out_proj", RowwiseParallel()}});
}

void shard(nn::Sequential& stack, const DeviceMesh& dp) {
  for (const auto& child : stack->children()) {
    fully_shard(*child, {.mesh = dp});
  }
  fully_shard(stack, {.mesh = dp});
}

/// Returns a step of forward and backward, and of Adam if `optimizes`.
std::function<void()> make_step(nn::Sequential stack, bool optimizes) {
  std::shared_ptr<torch::optim::Adam> optimizer;
  if (optimizes) {
    optimizer = std::make_shared<torch::optim::Adam>(stack->parameters(), torch::optim::AdamOptions(1e-2));
  }
  return [stack, optimizer, input = at::randn({kRows, kDim})]() mutable {
    stack->zero_grad();
    stack(input).sum().backward();
    if (optimizer) {
      optimizer->step();
    }
  };
}

/// Returns the milliseconds of a step on a mesh {dp, tp} over all ranks. An axis of one rank is not used.
double step_ms(int64_t dp, int64_t tp, int rounds) {
  auto stack = make_stack();
  if (dp * tp > 1) {
    const auto mesh = init_device_mesh(at::kCPU, {dp, tp}, {"dp", "tp"});
    if (tp > 1) {
      parallelize(stack, mesh["tp"]);
    }
    if (dp > 1) {
      shard(stack, mesh["dp"]);
    }
  }
  return microseconds({make_step(stack, true)}, wall_us, rounds)[0] / 1e3;
}

constexpr const char* kStep = "step_ms";

double threads_step_ms(int64_t dp, int64_t tp, int rounds) {
  return thread_ranks(static_cast<int>(dp * tp), [&] { return Results{{kStep, step_ms(dp, tp, rounds)}}; }).at(kStep);
}

double host_us(int rounds) {
  const RankContextGuard guard(RankContext::create());
  init_process_group({.backend = "fake", .rank = 0, .world_size = 4});
  auto plain = make_stack(), stack = make_stack();
  const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
  parallelize(stack, mesh["tp"]);
  shard(stack, mesh["dp"]);
  const auto times = microseconds({make_step(plain, false), make_step(stack, false)}, cpu_us, rounds);
  destroy_process_group();
  return times[1] - times[0];
}

void run(bool host_only, const BenchmarkOptions& options) {
  Results peer;
  const auto print = [&](const char* name, double value, const char* unit) {
    print_result(name, value, unit, peer, options.json);
  };
  const int rounds = options.rounds;
  if (!host_only) {
    const double shm = launch_ranks(4, "shm").at(kStep), gloo = launch_ranks(4, "gloo").at(kStep);
    peer = run_peer("benchmarks/peers/two_d_step_peer.py", fmt::format("--rounds {}", rounds));
    print("two_d/shm_step_ms", shm, "ms");
    print("two_d/gloo_step_ms", gloo, "ms");
    print("two_d/threads_step_ms", threads_step_ms(2, 2, rounds), "ms");
    print("tp/threads_step_ms", threads_step_ms(1, 2, rounds), "ms");
    print("dp/threads_step_ms", threads_step_ms(2, 1, rounds), "ms");
  }
  print("two_d/host_us", host_us(rounds), "us");
  print("plain/step_ms", launch_ranks(1, "shm").at(kStep), "ms");
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  bool host_only = false;
  const auto add_options = [&](CLI::App& app) {
    app.add_flag("--host-only", host_only, "Only what needs no other ranks and no peer");
  };
  return benchmark_main(argc, argv,
                        {.name = "two_d_step",
                         .description = "What a training step costs under tensor parallelism and fully_shard together.",
                         .add_options = add_options,
                         .run = [&](const BenchmarkOptions& options) { run(host_only, options); },
                         .on_rank =
                             [](const BenchmarkOptions& options) {
                               const int64_t ranks = get_world_size() == 1 ? 1 : 2;
                               return Results{{kStep, step_ms(ranks, ranks, options.rounds)}};
                             }});
}
