// DeviceMesh: a named grid of ranks. `./bazelw run //examples:device_mesh`
//
// Six ranks form the mesh {dp: 2, tp: 3}. Each axis has a separate process group, and slices of the mesh are meshes.

#include "device_mesh/device_mesh.h"

#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "comm/collectives.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"

using namespace tessera;

namespace {

void run_rank() {
  init_process_group();
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 3}, {"dp", "tp"});
  const DeviceMesh tp = mesh["tp"];  // the ranks of this rank's row

  // Sums the rank numbers over each axis: a mesh's collectives run in the group of an axis.
  const auto sum_over = [&](const DeviceMesh& axis) {
    const at::Tensor sum = at::full({1}, get_rank());
    all_reduce(sum, ReduceOp::Sum, axis.group());
    return sum.item<int64_t>();
  };
  const int64_t over_dp = sum_over(mesh["dp"]), over_tp = sum_over(tp);

  for (int rank = 0; rank < get_world_size(); ++rank) {
    if (rank == get_rank()) {
      fmt::print("rank {} of {} is at {}: tp ranks {}, their sum {}; dp ranks {}, their sum {}\n", rank, mesh,
                 mesh.coordinate(), tp.ranks(), over_tp, mesh["dp"].ranks(), over_dp);
      std::fflush(stdout);
    }
    barrier(default_group());
  }
  destroy_process_group();
}

}  // namespace

int main() {
  if (!launched_as_rank()) {
    return launch_local({.nproc = 6});
  }
  return report_errors(run_rank);
}
