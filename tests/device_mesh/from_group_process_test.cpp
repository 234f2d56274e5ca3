// A mesh over groups of ranks that are processes: some that the program has connected itself, and some of this library.

#include <ATen/ops/full.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/adopted_group.h"
#include "comm/collectives.h"
#include "device_mesh/device_mesh.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "tests/comm/cases/own_gloo.h"
#include "tests/device_mesh/mesh_helpers.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

TEST_CASE("a mesh over a program's own gloo groups, and over shared memory") {
  run_processes(
      4,
      [](int rank) {
        const Ints columns = rank % 2 == 0 ? Ints{2, 0} : Ints{3, 1};
        const auto theirs = testing::connect_own_gloo(fmt::format("column{}", rank % 2), columns);
        const auto dp = adopt_group(theirs, columns, "dp");
        const auto tp = new_group(rank < 2 ? Ints{0, 1} : Ints{2, 3}, "tp");
        const DeviceMesh mesh = DeviceMesh::from_group({dp, tp}, at::kCPU, {"dp", "tp"});
        expect_equal(mesh.ranks(), Ints{2, 3, 0, 1});
        expect_equal(mesh.coordinate(), Ints{rank < 2 ? 1 : 0, rank % 2});
        expect_equal(get_backend(mesh.group("dp")), std::string("gloo"));
        expect_equal(get_backend(mesh.group("tp")), std::string("shm"));
        const auto sum_over = [](const ProcessGroupPtr& group) {
          const at::Tensor tensor = at::full({3}, 1 << get_rank());
          all_reduce(tensor, ReduceOp::Sum, group);
          return tensor[2].item<int64_t>();
        };
        expect_equal(sum_over(mesh.group("dp")), rank % 2 == 0 ? 5 : 10);
        expect_equal(sum_over(mesh.group("tp")), rank < 2 ? 3 : 12);
        const DeviceMesh flat = mesh.flatten();
        expect_equal(group_ranks(flat.group()), mesh.ranks());
        expect_equal(sum_over(flat.group()), 15);
        expect_throws<ValueError>([&] { DeviceMesh::from_group({dp, dp}, at::kCPU); }, "a grid [2, 2] has 4 different");
      },
      {.backend = "shm"});
}

}  // namespace
}  // namespace tessera
