// Tensor parallelism: each matrix is sharded over the ranks, and all ranks see the same data.
// `./bazelw run //examples:tensor_parallel`
//
// Three ranks compute an MLP with 16 hidden features, which three does not divide. A plan says how each layer is
// sharded; the model's code does not change.

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <torch/utils.h>

#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "debug/comm_debug_mode.h"
#include "dtensor/dtensor.h"
#include "dtensor/visualize_sharding.h"
#include "nn/linear.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"

using namespace tessera;

namespace {

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    torch::manual_seed(0);
    up = register_module("up", nn::Linear(8, 16));
    down = register_module("down", nn::Linear(16, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(x))); }

  nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(Mlp);

void run_rank() {
  init_process_group();
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {3}, {"tp"});
  Mlp mlp, reference;
  parallelize_module(mlp, mesh,
                     {{"up", ColwiseParallel()},      // each rank has some hidden features
                      {"down", RowwiseParallel()}});  // and a term of each output feature

  torch::manual_seed(1);
  const at::Tensor x = at::randn({4, 8});
  CommDebugMode communication(*mlp);
  const at::Tensor y = mlp(x);  // plain tensors in and out
  y.square().mean().backward();

  const at::Tensor expected = reference(x);
  expected.square().mean().backward();
  const double difference = (y - expected).abs().max().item<double>();
  const double grad_difference =
      (full_tensor(mlp->up->weight.grad()) - reference->up->weight.grad()).abs().max().item<double>();
  if (get_rank() == 0) {
    fmt::print("up.weight is a {}\ndown.weight is a {}\n", describe(mlp->up->weight), describe(mlp->down->weight));
    fmt::print("forward and backward: {} all-reduce, since x needs no gradient\n",
               communication.calls(Collective::AllReduce));
    fmt::print("largest difference to one process: outputs {}, gradient of up.weight {}\n",
               difference < 1e-6 ? "below 1e-6" : "TOO LARGE", grad_difference < 1e-6 ? "below 1e-6" : "TOO LARGE");
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
