// HSDP: shards inside a group of ranks, replicas across groups. `./bazelw run //examples:hsdp`
//
// Four ranks form the mesh {replicate: 2, shard: 2}. Each pair holds the model once. Gradients are reduce-scattered
// within a pair and all-reduced across pairs, so that most bytes stay within a pair, such as a host.

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include "comm/comm_stats.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"
#include "dtensor/visualize_sharding.h"
#include "fully_shard/fully_shard.h"
#include "nn/linear.h"
#include "nn/sequential.h"

using namespace tessera;

namespace {

void run_rank() {
  init_process_group();
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"});

  torch::manual_seed(0);
  nn::Sequential net;
  net->push_back("up", nn::Linear(8, 32));
  net->push_back("down", nn::Linear(32, 1));
  for (const auto& layer : net->children()) {
    fully_shard(*layer, {.mesh = mesh});
  }
  fully_shard(net, {.mesh = mesh});

  torch::optim::SGD optimizer(net->parameters(), 0.05);
  torch::manual_seed(static_cast<uint64_t>(get_rank()));  // different data on each rank
  reset_comm_stats();
  for (int step = 0; step < 20; ++step) {
    const at::Tensor x = at::randn({16, 8});
    optimizer.zero_grad();
    (net(x) - x.sum(1, /*keepdim=*/true)).square().mean().backward();
    optimizer.step();
  }

  const at::Tensor weight = net->named_parameters()["up.weight"].detach();
  const double norm = full_tensor(weight).norm().item<double>();
  const CommStats stats = comm_stats();
  if (get_rank() == 0) {
    fmt::print("up.weight is a {}\n", describe(weight));
    fmt::print("its norm after 20 steps, on every rank: {:.4f}\n", norm);
    fmt::print("a step: {} all-gathers and {} reduce-scatters among 2 shards, {} all-reduces between 2 replicas\n",
               stats[Collective::AllGather].calls / 20, stats[Collective::ReduceScatter].calls / 20,
               stats[Collective::AllReduce].calls / 20);
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
