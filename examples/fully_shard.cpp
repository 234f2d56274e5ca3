// fully_shard: every rank keeps a shard of each parameter, and the full parameter only while a module runs.
// `./bazelw run //examples:fully_shard`
//
// Three ranks train a small network, each on different data. A copy of the model, trained in one process on all data,
// ends with the same parameters.

#include "fully_shard/fully_shard.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "dtensor/visualize_sharding.h"
#include "nn/linear.h"
#include "testing/parity.h"

using namespace tessera;

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(0);  // the same initial values on every rank
    up = register_module("up", nn::Linear(8, 17));
    down = register_module("down", nn::Linear(17, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return down(up(x).tanh()); }

  nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(Net);  // TORCH_MODULE with a hook point

at::Tensor compute_loss(Net& net, const at::Tensor& x) {
  return (net(x) - x.sum(1, /*keepdim=*/true).sin()).square().mean();
}

void run_rank() {
  init_process_group();
  const int64_t rank = get_rank(), ranks = get_world_size();
  Net net, reference;
  torch::optim::Adam optimizer(net->parameters(), 1e-2);  // before or after sharding
  torch::optim::Adam reference_optimizer(reference->parameters(), 1e-2);

  const DeviceMesh mesh = init_device_mesh(at::kCPU, {ranks}, {"dp"});
  fully_shard(net->up, {.mesh = mesh});  // units, submodules first
  fully_shard(net, {.mesh = mesh});      // the remaining `down`
  if (rank == 0) {
    fmt::print("up.weight is a {}\n", describe(net->up->weight));
  }

  for (int step = 0; step <= 100; ++step) {
    torch::manual_seed(static_cast<uint64_t>(step) + 1);
    const at::Tensor batch = at::randn({4 * ranks, 8});  // for all ranks; each takes its own rows
    optimizer.zero_grad();
    compute_loss(net, batch.narrow(0, 4 * rank, 4)).backward();  // sharded gradients, averaged over the ranks
    optimizer.step();                                            // of this rank's rows only

    reference_optimizer.zero_grad();
    const at::Tensor loss = compute_loss(reference, batch);
    loss.backward();
    reference_optimizer.step();
    if (rank == 0 && step % 50 == 0) {
      fmt::print("step {:>3}: loss {:.4f}\n", step, loss.item<float>());
    }
  }
  check_sharded_parity(reference, net, {.tolerance = {.rtol = 1e-3, .atol = 1e-4}});
  if (rank == 0) {
    fmt::print("the sharded model equals the one that was trained in one process\n");
  }
  destroy_process_group();
}

}  // namespace

int main() {
  if (!launched_as_rank()) {
    return launch_local({.nproc = 3});
  }
  return report_errors(run_rank);
}
