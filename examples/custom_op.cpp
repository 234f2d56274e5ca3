// A custom op on DTensors. `./bazelw run //examples:custom_op`
//
// A kernel of this program smooths a robot's tracks, [tracks, steps, coordinates], along the steps. Tracks are
// independent, so they may be sharded. If the steps are sharded, a rank lacks its neighbors' steps, so the tensor must
// be redistributed first. register_sharding declares this, and then the op runs on DTensors as on plain tensors.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <fmt/format.h>
#include <torch/library.h>

#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"
#include "dtensor/register_sharding.h"
#include "dtensor/visualize_sharding.h"

using namespace tessera;

namespace {

// Replaces each step after the first with the mean of that step and the previous one.
at::Tensor smooth(const at::Tensor& tracks) {
  at::Tensor result = tracks.clone();
  const int64_t steps = tracks.size(1);
  result.narrow(1, 1, steps - 1).add_(tracks.narrow(1, 0, steps - 1)).div_(2);
  return result;
}

// Returns a tensor with the result's metadata, without data.
at::Tensor smooth_meta(const at::Tensor& tracks) {
  return at::empty_like(tracks);
}

TORCH_LIBRARY(robots, library) {
  library.def("smooth(Tensor tracks) -> Tensor");
}

TORCH_LIBRARY_IMPL(robots, CPU, library) {
  library.impl("smooth", &smooth);
}

TORCH_LIBRARY_IMPL(robots, Meta, library) {
  library.impl("smooth", &smooth_meta);
}

at::Tensor call_smooth(const at::Tensor& tracks) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("robots::smooth", "").typed<at::Tensor(const at::Tensor&)>();
  return op.call(tracks);
}

// Returns the output's placement for each valid placement of the operand, on one axis of a mesh.
Strategies strategies_of_smooth(const OpCall&) {
  return {{.operands = {Shard(0)}, .outputs = {Shard(0)}}, {.operands = {Shard(2)}, .outputs = {Shard(2)}}};
}

void run_rank() {
  init_process_group();
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
  register_sharding("robots::smooth", strategies_of_smooth);

  const at::Tensor tracks = at::arange(30, at::kFloat).view({3, 5, 2}).square();
  const at::Tensor expected = smooth(tracks);
  for (const int64_t dim : {0, 1, 2}) {
    const at::Tensor cut = distribute_tensor(tracks, mesh, {Shard(dim)});
    const at::Tensor smoothed = call_smooth(cut);
    const bool equal = full_tensor(smoothed).equal(expected);
    if (get_rank() == 0) {
      fmt::print("{} -> {}: {}\n", describe(cut), describe(smoothed), equal ? "as in one process" : "WRONG");
    }
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
