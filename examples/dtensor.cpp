// DTensor: one tensor distributed over many ranks. `./bazelw run //examples:dtensor`
//
// A [5, 4] matrix is sharded over two ranks, multiplied, redistributed, and differentiated. The ops are libtorch's; a
// DTensor is an at::Tensor of the global size.

#include "dtensor/dtensor.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>

#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "dtensor/visualize_sharding.h"

using namespace tessera;

namespace {

void show(const std::string& what, const at::Tensor& tensor) {
  if (get_rank() == 0) {
    fmt::print("{:<28} {}\n", what, describe(tensor));
    std::fflush(stdout);
  }
}

void run_rank() {
  init_process_group();
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2}, {"tp"});

  const at::Tensor matrix = at::arange(20, at::kFloat).view({5, 4});
  const at::Tensor rows = distribute_tensor(matrix, mesh, {Shard(0)}).requires_grad_();  // 3 rows and 2
  const at::Tensor weight = distribute_tensor(at::ones({4, 3}), mesh, {Replicate()}).requires_grad_();
  show("rows", rows);
  show("weight", weight);

  const at::Tensor product = rows.mm(weight);  // each rank multiplies its rows, without communication
  show("rows.mm(weight)", product);
  const at::Tensor total = product.sum();  // partial: each rank has a term of the sum
  show("its sum", total);
  show("as columns", redistribute(product, {Shard(1)}));  // an all-to-all

  total.backward();
  show("weight.grad", weight.grad());  // partial; full_tensor() adds the terms
  const float sum = full_tensor(total.detach()).item<float>();
  const at::Tensor gradient = full_tensor(weight.grad());
  if (get_rank() == 0) {
    fmt::print("{}", visualize_sharding(rows.detach()));
    fmt::print("the sum is {} and the weight's gradient has column sums {} in every column\n", sum,
               gradient.sum(0)[0].item<float>());
  }
  destroy_process_group();
}

}  // namespace

int main() {
  if (!launched_as_rank()) {
    return launch_local({.nproc = 2});
  }
  return report_errors(run_rank);
}
