// Meshes over groups that are there already, and over some of the ranks.

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/context/rank_context.h"
#include "device_mesh/device_mesh.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/device_mesh/mesh_helpers.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

/// This rank's group along each axis of a grid of `ranks`, row-major.
std::vector<ProcessGroupPtr> groups_of_grid(const Ints& shape, const Ints& ranks) {
  const DeviceMesh places = init_device_mesh(at::kCPU, shape, {}, ranks);
  std::vector<ProcessGroupPtr> groups;
  for (int64_t axis = 0; axis < places.ndim(); ++axis) {
    groups.push_back(new_group(group_ranks(places.group(axis)), fmt::format("own {}", axis)));
  }
  return groups;
}

TEST_CASE("a mesh over one group") {
  run_ranks(3, [](int rank) {
    const DeviceMesh world = DeviceMesh::from_group(default_group(), at::kCPU);
    TESSERA_EXPECT(world == init_device_mesh(at::kCPU, {3}));
    TESSERA_EXPECT(world.group() == default_group());
    const ProcessGroupPtr alone = new_group({rank}, "alone");
    expect_equal(DeviceMesh::from_group(alone, at::kCPU, "tp").ranks(), Ints{rank});
    if (rank != 1) {
      const ProcessGroupPtr pair = new_group({2, 0}, "pair");
      const DeviceMesh mesh = DeviceMesh::from_group(pair, at::kCPU, "dp");
      expect_equal(mesh.to_string(), std::string("DeviceMesh(cpu, {dp: 2})"));
      expect_equal(mesh.ranks(), Ints{2, 0});
      expect_equal(mesh.coordinate(), Ints{rank == 2 ? 0 : 1});
      TESSERA_EXPECT(mesh.group("dp") == pair && mesh.root() == mesh);
      expect_equal(sum_over(mesh.group()), 5.f);
    }
  });
}

TEST_CASE("a mesh over two groups is the mesh that makes such groups") {
  run_ranks(6, [](int rank) {
    const DeviceMesh made = init_device_mesh(at::kCPU, {2, 3}, {"dp", "tp"});
    const auto groups = groups_of_grid({2, 3}, {0, 1, 2, 3, 4, 5});
    const DeviceMesh mesh = DeviceMesh::from_group(groups, at::kCPU, {"dp", "tp"});
    TESSERA_EXPECT(mesh == made && mesh.hash() == made.hash() && !mesh.shares_groups_with(made));
    TESSERA_EXPECT(mesh.group("dp") == groups[0] && mesh["tp"].group() == groups[1]);
    TESSERA_EXPECT(mesh["tp"] == made["tp"]);
    expect_equal(sum_over(mesh.group("dp")), float((1 << rank % 3) * 9));
    TESSERA_EXPECT(mesh.flatten() == made.flatten());
  });
}

TEST_CASE("a grid of any ranks in any order, of three axes, one of them of one rank") {
  const Ints ranks = {6, 1, 3, 0, 5, 2};
  run_ranks(7, [&](int rank) {
    if (rank == 4) {
      return;
    }
    const auto groups = groups_of_grid({3, 1, 2}, ranks);
    const DeviceMesh mesh = DeviceMesh::from_group(groups, at::kCPU, {"dp", "cp", "tp"});
    const int64_t place = std::ranges::find(ranks, rank) - ranks.begin();
    expect_equal(mesh.ranks(), ranks);
    expect_equal(mesh.coordinate(), Ints{place / 2, 0, place % 2});
    expect_equal(mesh.local_rank(), place);
    expect_equal(mesh["dp"].ranks(), place % 2 == 0 ? Ints{6, 3, 5} : Ints{1, 0, 2});
    expect_equal((mesh[{"tp", "dp"}].ranks()), Ints{6, 3, 5, 1, 0, 2});
    const DeviceMesh flat = mesh.flatten({"dp", "tp"}, "all");
    expect_equal(flat.ranks(), ranks);
    expect_equal(group_ranks(flat.group()), ranks);
    expect_equal(sum_over(mesh["all"].group()), 111.f);
    const DeviceMesh one = mesh[{"cp", "tp"}].flatten({}, "one");
    TESSERA_EXPECT(one == mesh["one"]);
    expect_equal(one.ranks(), mesh["tp"].ranks());
    expect_throws<KeyError>([&] { mesh["dp"]["all"]; }, "has no axis \"all\"");
  });
}

TEST_CASE("groups that are no axes of one mesh are an error on all ranks") {
  run_ranks(4, [](int rank) {
    const auto world = default_group();
    expect_throws<ValueError>(
        [&] {
          DeviceMesh::from_group({world, world}, at::kCPU);
        },
        "a grid [4, 4] has 16 different ranks, but the groups lead to [0, 1, 2, 3, 0, 1");
    // Rank pairs {0, 1}, {2, 3} and {0, 3}, {1, 2}: from rank 2 on the second axis runs backwards.
    const auto rows = new_group(rank < 2 ? Ints{0, 1} : Ints{2, 3}, "row");
    const auto columns = new_group(rank == 0 || rank == 3 ? Ints{0, 3} : Ints{1, 2}, "column");
    expect_throws<ValueError>(
        [&] {
          DeviceMesh::from_group({columns, rows}, at::kCPU);
        },
        "the ranks' groups are not the axes of one mesh");
    const auto straight = new_group(rank % 2 == 0 ? Ints{0, 2} : Ints{1, 3}, "straight");
    const std::string name = rank == 3 ? "dq" : "dp";
    expect_throws<ValueError>(
        [&] {
          DeviceMesh::from_group({straight, rows}, at::kCPU, {name, "tp"});
        },
        "has axes dp, tp on cpu, ranks [0, 1, 2, 3]");
    expect_throws<ValueError>(
        [&] {
          DeviceMesh::from_group({straight, rows}, at::kCPU, {name, "tp"});
        },
        "has axes dq, tp on cpu, ranks [0, 1, 2, 3]");
    expect_equal(DeviceMesh::from_group({straight, rows}, at::kCPU).ranks(), Ints{0, 1, 2, 3});

    expect_throws<ValueError>([&] { DeviceMesh::from_group(std::vector<ProcessGroupPtr>{}, at::kCPU); }, "no groups");
    expect_throws<ValueError>([&] { DeviceMesh::from_group(ProcessGroupPtr(), at::kCPU); }, "group is undefined");
    expect_throws<ValueError>(
        [&] {
          DeviceMesh::from_group({straight, rows}, at::kCPU, {"a"});
        },
        "DeviceMesh::from_group: 1 axis names [a] for 2 axes");
    expect_throws<ValueError>([&] { DeviceMesh::from_group(world, at::kMPS); }, "device type mps; the backend");
  });
}

TEST_CASE("over groups that move no data the grid follows from this rank's") {
  RankContextGuard guard(RankContext::create());
  init_process_group({.backend = "fake", .rank = 9, .world_size = 12});
  const DeviceMesh made = init_device_mesh(at::kCPU, {2, 3, 2}, {"a", "b", "c"});
  const DeviceMesh mesh =
      DeviceMesh::from_group({made.group("a"), made.group("b"), made.group("c")}, at::kCPU, {"a", "b", "c"});
  CHECK(mesh == made);
}

TEST_CASE("a mesh over some of the ranks") {
  run_ranks(5, [](int rank) {
    if (rank == 2) {
      expect_throws<ValueError>(
          [] {
            init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"}, {4, 0, 1, 3});
          },
          "ranks [4, 0, 1, 3] are without the caller, rank 2; only they call it");
      return;
    }
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"}, {4, 0, 1, 3});
    expect_equal(mesh.ranks(), Ints{4, 0, 1, 3});
    expect_equal(mesh["tp"].ranks(), rank == 4 || rank == 0 ? Ints{4, 0} : Ints{1, 3});
    expect_equal(mesh["dp"].ranks(), rank == 4 || rank == 1 ? Ints{4, 1} : Ints{0, 3});
    expect_equal(sum_over(mesh.flatten().group()), 27.f);
    expect_equal(mesh["dp_tp"].ranks(), Ints{4, 0, 1, 3});

    expect_throws<ValueError>(
        [] {
          init_device_mesh(at::kCPU, {3}, {}, {4, 0, 1, 3});
        },
        "shape [3] needs 3 ranks, but the ranks given are 4; choose sizes whose product is 4, or "
        "give 3 ranks");
    expect_throws<ValueError>([] { init_device_mesh(at::kCPU, {2}, {}, {1, 1}); }, "each of the ranks 0 to 4");
    expect_throws<ValueError>([] { init_device_mesh(at::kCPU, {2}, {}, {1, 5}); }, "each of the ranks 0 to 4");
  });
}

}  // namespace
}  // namespace tessera
