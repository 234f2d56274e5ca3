// 2-D parallelism: fully_shard on top of tensor parallelism, by stacking placements. `./bazelw run //examples:two_d`
//
// Four ranks form the mesh {dp: 2, tp: 2}. Ranks of one tp group share the work on the same data; fully_shard then
// shards over dp what tp has sharded. The order is always the same: plan, checkpointing, fully_shard.

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include "activation_checkpoint/checkpoint.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/visualize_sharding.h"
#include "fully_shard/fully_shard.h"
#include "nn/linear.h"
#include "nn/sequential.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"
#include "testing/parity.h"

using namespace tessera;

namespace {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim) {
    up = register_module("up", nn::Linear(dim, 3 * dim));
    down = register_module("down", nn::Linear(3 * dim, dim));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(x))); }

  nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(Block);

nn::Sequential make_model() {
  torch::manual_seed(0);
  nn::Sequential model;
  for (int i = 0; i < 3; ++i) {
    model->push_back("block" + std::to_string(i), Block(5));  // 5 and 15 features on 2 x 2 ranks: all shards are uneven
  }
  return model;
}

void run_rank() {
  init_process_group();
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
  nn::Sequential model = make_model(), reference = make_model();
  parallelize_module(model, mesh["tp"], {{"*.up", ColwiseParallel()}, {"*.down", RowwiseParallel()}});
  for (const auto& block : model->children()) {
    checkpoint_module(*block);
    fully_shard(*block, {.mesh = mesh["dp"]});
  }
  fully_shard(model, {.mesh = mesh["dp"]});
  if (get_rank() == 0) {
    fmt::print("block0.up.weight is a {}\n", describe(model->named_parameters()["block0.up.weight"]));
  }

  torch::optim::AdamW optimizer(model->parameters(), 1e-2), reference_optimizer(reference->parameters(), 1e-2);
  for (uint64_t step = 0; step < 20; ++step) {
    torch::manual_seed(step + 1);
    const at::Tensor batch = at::randn({8, 5});
    const auto train = [](nn::Sequential& net, const at::Tensor& x, torch::optim::AdamW& adam) {
      adam.zero_grad();
      (net(x) - x.sin()).square().mean().backward();
      clip_grad_norm_(net->parameters(), 1.0);
      adam.step();
    };
    train(model, batch.narrow(0, 4 * mesh.local_rank("dp"), 4), optimizer);
    train(reference, batch, reference_optimizer);
  }
  check_sharded_parity(reference, model, {.tolerance = {.rtol = 1e-3, .atol = 1e-4}});
  if (get_rank() == 0) {
    fmt::print("after 20 steps it equals the model that was trained in one process\n");
  }
  destroy_process_group();
}

}  // namespace

int main() {
  if (!launched_as_rank()) {
    return launch_local({.nproc = 4});
  }
  return report_errors(run_rank);
}
