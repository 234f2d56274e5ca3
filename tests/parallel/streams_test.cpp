// What a step of tensor-parallel training makes the host wait for, seen on a simulated GPU (testing/simulated_gpu).

#include <ATen/ops/cross_entropy_loss.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <string>
#include <vector>

#include "activation_checkpoint/checkpoint.h"
#include "comm/collectives.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "optim/fused_optimizers.h"
#include "parallel/parallelize_module.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/simulated_gpu/simulated_gpu.h"
#include "testing/test_devices.h"
#include "tests/parallel/llama.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("streams: the host waits for nothing in a steady step of 2-D training, clipping and optimizer included",
          "[parallel]") {
  const bool is_fused = GENERATE(true, false), checkpoints = GENERATE(true, false);
  CAPTURE(is_fused, checkpoints);
  run_ranks(4, [&](int /*rank*/) {
    const c10::Device gpu(c10::kCUDA, 0);
    const OwnStream stream(gpu);
    const auto mesh = init_device_mesh(at::kCUDA, {2, 2}, {"dp", "tp"});
    auto model = make_llama({.layers = 2}, gpu);
    parallelize_module(model, mesh["tp"], llama_plan());
    for (auto& block : model->blocks) {
      if (checkpoints) {
        checkpoint_module(*block);
      }
      fully_shard(block, {.mesh = mesh["dp"]});
    }
    fully_shard(model, {.mesh = mesh["dp"]});
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (is_fused) {
      optimizer = std::make_unique<optim::FusedAdamW>(model->parameters(), torch::optim::AdamWOptions(1e-2));
    } else {
      optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-2));
    }
    const auto tokens = make_tokens(4, 7, gpu);
    const auto targets = distribute_tensor(make_tokens(5, 7, gpu), mesh["tp"], {Replicate()}).flatten();
    for (int step = 0; step < 4; ++step) {
      barrier(default_group());
      if (step == 2) {
        simulated_gpu::forget_host_waits();
        barrier(default_group());
      }
      optimizer->zero_grad();
      at::cross_entropy_loss(model(tokens).flatten(0, 1), targets).backward();
      clip_grad_norm_(model->parameters(), 1.0);
      optimizer->step();
    }
    barrier(default_group());
    // The model copies its table of positions from the host: four ranks in two forwards.
    expect_equal(simulated_gpu::host_waits(), std::vector<std::string>(8, "aten::copy_"));
  });
}

}  // namespace tessera::testing
