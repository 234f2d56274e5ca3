#include "device_mesh/device_mesh.h"

#include <ATen/Context.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/context/rank_context.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/device_mesh/mesh_helpers.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;
using Names = std::vector<std::string>;

TEST_CASE("a 1-D mesh reuses the default group") {
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(world_size, [&](int rank) {
      const DeviceMesh mesh = init_device_mesh(at::kCPU, {world_size});
      expect_equal(mesh.axis_names(), Names{"axis_0"});
      expect_equal(mesh.size(), world_size);
      expect_equal(mesh.local_rank(), rank);
      expect_equal(mesh.coordinate(), Ints{rank});
      TESSERA_EXPECT(mesh.group() == default_group());
      TESSERA_EXPECT(mesh.group(0) == default_group());
      TESSERA_EXPECT(mesh["axis_0"] == mesh);
      expect_equal(fmt::format("{}", mesh), fmt::format("DeviceMesh(cpu, {{axis_0: {}}})", world_size));
    });
  }
}

TEST_CASE("a 2 x 2 mesh: sizes, coordinates, groups and slices") {
  run_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    expect_equal(fmt::format("{}", mesh), std::string("DeviceMesh(cpu, {dp: 2, tp: 2})"));
    expect_equal(mesh.ndim(), 2);
    expect_equal(mesh.shape(), Ints{2, 2});
    expect_equal(mesh.size(), 4);
    expect_equal(mesh.size("tp"), 2);
    expect_equal(mesh.size(-1), 2);
    expect_equal(mesh.coordinate(), Ints{rank / 2, rank % 2});
    expect_equal(mesh.local_rank("dp"), rank / 2);
    expect_equal(mesh.local_rank(1), rank % 2);
    expect_equal(mesh.ranks(), Ints{0, 1, 2, 3});
    expect_equal(mesh["dp"].ranks(), rank % 2 == 0 ? Ints{0, 2} : Ints{1, 3});
    expect_equal(mesh["tp"].ranks(), rank < 2 ? Ints{0, 1} : Ints{2, 3});
    expect_equal(group_ranks(mesh.group("tp")), mesh["tp"].ranks());
    TESSERA_EXPECT(mesh["tp"].root() == mesh);
    TESSERA_EXPECT(mesh.root() == mesh);
    TESSERA_EXPECT(mesh["tp"].group() == mesh.group("tp"));
    TESSERA_EXPECT(mesh["tp"].group() == mesh.group(1));
    expect_equal(sum_over(mesh.group("dp")), rank % 2 == 0 ? 5.f : 10.f);
    expect_equal(sum_over(mesh.group("tp")), rank < 2 ? 3.f : 12.f);
    TESSERA_EXPECT((mesh[{"dp", "tp"}] == mesh));
    const DeviceMesh swapped = mesh[{"tp", "dp"}];
    TESSERA_EXPECT(swapped != mesh);
    expect_equal(swapped.ranks(), Ints{0, 2, 1, 3});
    expect_equal(swapped.coordinate(), Ints{rank % 2, rank / 2});
  });
}

TEST_CASE("three axes, one of them of one rank") {
  run_ranks(6, [](int rank) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {3, 1, 2}, {"dp", "cp", "tp"});
    expect_equal(mesh.coordinate(), Ints{rank / 2, 0, rank % 2});
    expect_equal(mesh["cp"].ranks(), Ints{rank});
    expect_equal(sum_over(mesh.group("cp")), float(1 << rank));
    const DeviceMesh pair = mesh[{"dp", "cp"}];
    expect_equal(pair.shape(), Ints{3, 1});
    expect_equal(pair.ranks(), rank % 2 == 0 ? Ints{0, 2, 4} : Ints{1, 3, 5});
    expect_equal(pair["dp"].local_rank(), rank / 2);
  });
}

TEST_CASE("flatten makes an axis that is found by name") {
  run_ranks(8, [](int rank) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"pp", "dp", "tp"});
    const DeviceMesh flat = mesh.flatten({"pp", "tp"}, "both");
    expect_equal(flat.ranks(), rank / 2 % 2 == 0 ? Ints{0, 1, 4, 5} : Ints{2, 3, 6, 7});
    expect_equal(flat.local_rank(), rank / 4 * 2 + rank % 2);
    expect_equal(sum_over(flat.group()), rank / 2 % 2 == 0 ? 51.f : 204.f);
    TESSERA_EXPECT(mesh["both"] == flat);
    TESSERA_EXPECT(mesh.group("both") == flat.group());
    expect_equal(mesh.size("both"), int64_t{4});
    expect_equal(mesh.local_rank("both"), flat.local_rank());
    expect_throws<KeyError>([&] { mesh["dp"].group("both"); }, "has no axis \"both\"");
    TESSERA_EXPECT((mesh[{"dp", "both"}].shape() == Ints{2, 4}));
    TESSERA_EXPECT(mesh.flatten({"pp", "tp"}, "both").group() == flat.group());
    TESSERA_EXPECT((mesh[{"pp", "tp"}]["both"] == flat));
    const DeviceMesh all = mesh.flatten();
    expect_equal(all.axis_names(), Names{"pp_dp_tp"});
    expect_equal(all.ranks(), Ints{0, 1, 2, 3, 4, 5, 6, 7});
    TESSERA_EXPECT(all.group() == default_group());
    const DeviceMesh from_slice = mesh[{"dp", "tp"}].flatten();
    TESSERA_EXPECT(mesh["dp_tp"] == from_slice);

    expect_throws<ValueError>([&] { mesh.flatten({"pp", "dp"}, "both"); }, "the name is another axis already");
    expect_throws<ValueError>([&] { mesh.flatten({"pp", "dp"}, "tp"); }, "the name is another axis already");
    expect_throws<ValueError>([&] { mesh["tp"].flatten({}, "dp"); }, "the name is another axis already");
    expect_throws<ValueError>([&] { mesh[{"pp", "tp"}].flatten({}, "dp"); }, "the name is another axis already");
    TESSERA_EXPECT((mesh[{"dp", "tp"}].flatten({"dp"}, "dp") == mesh["dp"]));
    expect_throws<ValueError>([&] { mesh[{"both", "tp"}]; }, "axes \"both\" and \"tp\" share");
    expect_throws<ValueError>([&] { mesh[{"tp", "tp"}]; }, "axes \"tp\" and \"tp\" share");
    expect_throws<KeyError>([&] { mesh["dp"]["both"]; }, "has no axis \"both\"");
    expect_throws<KeyError>([&] { mesh["bth"]; }, "did you mean \"both\"?");
  });
}

TEST_CASE("with_device_type is the same mesh, with the same groups, if their backends are for it") {
  run_ranks(4, [](int) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    TESSERA_EXPECT(mesh["dp"].with_device_type(at::kCPU) == mesh["dp"]);
    if (!has_backend(default_group(), at::kCUDA)) {
      expect_throws<ValueError>([&] { mesh["tp"].with_device_type(at::kCUDA); },
                                "DeviceMesh::with_device_type: device type cuda; the backend \"threads\" of axis tp's");
      return;
    }
    const DeviceMesh other = mesh.with_device_type(at::kCUDA);
    TESSERA_EXPECT(other != mesh && other.device_type() == at::kCUDA && other.shares_groups_with(mesh));
    TESSERA_EXPECT(other["tp"] == mesh["tp"].with_device_type(at::kCUDA) && other.ranks() == mesh.ranks());
    TESSERA_EXPECT(other["dp"].root() == other && other.with_device_type(at::kCPU) == mesh);
    TESSERA_EXPECT(other["tp"] == init_device_mesh(at::kCUDA, {2, 2}, {"dp", "tp"})["tp"]);
  });
}

TEST_CASE("equality and hash: ranks, shape, names, and the rank context") {
  std::array<DeviceMesh, 2> meshes;
  run_ranks(2, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {1, 2}, {"dp", "tp"});
    const DeviceMesh same = init_device_mesh(at::kCPU, {1, 2}, {"dp", "tp"});
    const DeviceMesh other_names = init_device_mesh(at::kCPU, {1, 2}, {"dp", "cp"});
    const DeviceMesh other_shape = init_device_mesh(at::kCPU, {2, 1}, {"dp", "tp"});
    TESSERA_EXPECT(mesh == same);
    expect_equal(mesh.hash(), same.hash());
    TESSERA_EXPECT(mesh != other_names);
    TESSERA_EXPECT(mesh != other_shape);
    TESSERA_EXPECT(mesh != mesh["tp"]);
    TESSERA_EXPECT(mesh["tp"] == mesh["tp"]);
    TESSERA_EXPECT(mesh.hash() != other_names.hash() && mesh.hash() != other_shape.hash());
    TESSERA_EXPECT(mesh != DeviceMesh());
    meshes[rank] = mesh;
  });
  CHECK(meshes[0] != meshes[1]);
  CHECK(DeviceMesh() == DeviceMesh());
  CHECK(fmt::format("{}", DeviceMesh()) == "DeviceMesh(empty)");
}

TEST_CASE("meshes that cannot be") {
  run_ranks(4, [](int) {
    expect_throws<ValueError>(
        [] {
          init_device_mesh(at::kCPU, {2, 3});
        },
        "shape [2, 3] needs 6 ranks, but the world has 4; choose sizes whose product is 4, or start 6");
    expect_throws<ValueError>([] { init_device_mesh(at::kCPU, {4, 0}); }, "shape [4, 0]; sizes are from 1 to 2^31 - 1");
    expect_throws<ValueError>([] { init_device_mesh(at::kCPU, {-2, -2}); }, "sizes are from 1 to 2^31 - 1");
    expect_throws<ValueError>([] { init_device_mesh(at::kCPU, {}); }, "the shape has no axes");
    expect_throws<ValueError>([] { init_device_mesh(at::kCPU, {2, 2}, {"dp"}); }, "1 axis names [dp] for 2 axes");
    expect_throws<ValueError>([] { init_device_mesh(at::kCPU, {2, 2}, {"a", "a"}); }, "\"a\" is there twice in [a, a]");
    expect_throws<ValueError>([] { init_device_mesh(at::kCPU, {2, 2}, {"a", ""}); }, "axis 1 has an empty name");
    if (!at::hasCUDA()) {
      expect_throws<ValueError>([] { init_device_mesh(at::kCUDA, {4}); }, "device type cuda");
    }
    barrier(default_group());
  });
}

TEST_CASE("questions that have no answer") {
  run_ranks(4, [](int) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    expect_throws<KeyError>([&] { mesh.size("pt"); },
                            "DeviceMesh(cpu, {dp: 2, tp: 2}) has no axis \"pt\"; its axes are dp, tp");
    expect_throws<KeyError>([&] { mesh["tpp"]; }, "did you mean \"tp\"?");
    expect_throws<KeyError>([&] { mesh["dp"]["tp"]; }, "its axes are dp");
    expect_throws<ValueError>([&] { mesh.size(2); }, "axis 2; a mesh of 2 axes has axes 0 to 1");
    expect_throws<ValueError>([&] { mesh.group(-3); }, "axis -3");
    expect_throws<ValueError>([&] { mesh.group(); }, "mesh.flatten().group()");
    expect_throws<StateError>([] { DeviceMesh().size(); }, "make one by init_device_mesh");
  });
}

TEST_CASE("without a process group init_device_mesh sets one up") {
  RankContextGuard guard(RankContext::create());
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {1, 1}, {"dp", "tp"});
  CHECK(is_initialized());
  CHECK(mesh.coordinate() == Ints{0, 0});
  CHECK(mesh.flatten().group() == default_group());
}

TEST_CASE("ranks that ask for different meshes are refused on all of them") {
  const std::vector<std::function<DeviceMesh(int)>> calls = {
      [](int rank) {
        return init_device_mesh(at::kCPU, rank == 3 ? Ints{4, 1} : Ints{2, 2}, {"dp", "tp"});
      },
      [](int rank) {
        return init_device_mesh(at::kCPU, rank == 3 ? Ints{4} : Ints{2, 2});
      },
      [](int rank) {
        return init_device_mesh(at::kCPU, rank == 1 ? Ints{2, 3} : Ints{2, 2});
      },
      [](int rank) {
        return init_device_mesh(at::kCPU, {2, 2}, rank == 0 ? Names{"dp", "tp"} : Names{"tp", "dp"});
      },
  };
  for (const auto& call : calls) {
    run_ranks(4, [&](int rank) { expect_throws<ValueError>([&] { call(rank); }, "shape ["); },
              {.timeout = std::chrono::seconds(20)});
  }
  run_ranks(4, [&](int rank) {
    expect_throws<ValueError>([&] { calls[0](rank); },
                              rank == 3 ? "rank 3 has shape [4, 1], names [dp, tp] on cpu, rank 0 has shape [2, 2]"
                                        : "rank 3 has shape [4, 1], names [dp, tp] on cpu. Give the same ones");
  });
}

TEST_CASE("ranks of a mesh over some ranks that ask for different ones are refused on all of them") {
  struct Call {
    Ints ranks;
    std::function<DeviceMesh(int, const Ints&)> make;
  };
  const std::vector<Call> calls = {
      {.ranks = {0, 1},
       .make =
           [](int rank, const Ints& ranks) {
             return init_device_mesh(at::kCPU, rank == 0 ? Ints{2} : Ints{1, 2}, {}, ranks);
           }},
      {.ranks = {3, 1, 0, 4},
       .make =
           [](int rank, const Ints& ranks) {
             return init_device_mesh(at::kCPU, rank == 4 ? Ints{2, 2} : Ints{4}, {}, ranks);
           }},
      {.ranks = {4, 2},
       .make = [](int rank,
                  const Ints& ranks) { return init_device_mesh(at::kCPU, {2}, {rank == 4 ? "dp" : "tp"}, ranks); }},
      {.ranks = {1, 2, 3},
       .make =
           [](int rank, const Ints& ranks) {
             return init_device_mesh(at::kCPU, {3}, {"dp"}, rank == 2 ? Ints{3, 2, 1} : ranks);
           }},
      {.ranks = {1, 4},
       .make = [](int rank, const Ints& ranks) { return init_device_mesh(at::kCPU, {rank == 1 ? 3 : 2}, {}, ranks); }},
  };
  run_ranks(5, [&](int rank) {
    for (const auto& [ranks, make] : calls) {
      if (std::ranges::find(ranks, rank) != ranks.end()) {
        expect_throws<ValueError>([&] { make(rank, ranks); }, "shape [");
        expect_equal(init_device_mesh(at::kCPU, {std::ssize(ranks)}, {}, ranks).ranks(), ranks);
      }
    }
    if (rank == 1 || rank == 4) {
      expect_throws<ValueError>(
          [&] {
            calls[0].make(rank == 1 ? 0 : 1, {4, 1});
          },
          rank == 1 ? "rank 1 has shape [2], names [], ranks [4, 1] on cpu, rank 4 has shape "
                      "[1, 2], names [], ranks [4, 1] on cpu"
                    : "rank 4 has shape [1, 2], names [], ranks [4, 1] on cpu, rank 1 has");
    }
  });
}

TEST_CASE("ranks that flatten different axes, or by different names, are refused on all of them") {
  const std::vector<std::function<DeviceMesh(int, const DeviceMesh&)>> calls = {
      [](int rank, const DeviceMesh& mesh) {
        return mesh.flatten(rank == 3 ? Names{"tp", "dp"} : Names{"dp", "tp"});
      },
      [](int rank, const DeviceMesh& mesh) {
        return mesh.flatten(rank == 1 ? Names{"dp"} : Names{"dp", "tp"}, "new");
      },
      [](int rank, const DeviceMesh& mesh) {
        return mesh.flatten({"dp", "tp"}, rank == 0 ? "a" : "b");
      },
      [](int rank, const DeviceMesh& mesh) { return mesh.flatten({rank == 0 ? "dp" : "tp"}, "other"); },
  };
  run_ranks(4, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    for (const auto& call : calls) {
      expect_throws<ValueError>([&] { call(rank, mesh); }, "DeviceMesh::flatten: the ranks differ: rank 0 has axes [");
    }
    expect_throws<ValueError>([&] { calls[2](rank, mesh); },
                              "rank 0 has axes [dp, tp] as \"a\", rank 1 has axes [dp, tp] as \"b\"");
    const auto misspell = [&] { mesh.flatten({rank == 2 ? "pd" : "dp", "tp"}, "new"); };
    if (rank == 2) {
      expect_throws<KeyError>(misspell, "has no axis \"pd\"");
    } else {
      expect_throws<ValueError>(misspell, "DeviceMesh::flatten: rank 2 cannot: DeviceMesh(cpu, {dp: 2, tp: 2}) has no");
    }
    expect_equal(mesh.flatten({"dp", "tp"}, "new").ranks(), Ints{0, 1, 2, 3});
    if (rank == 3) {
      expect_equal(mesh.flatten({"dp", "tp"}, "new").ranks(), Ints{0, 1, 2, 3});  // it is known: nobody is asked
    }
  });
}

}  // namespace
}  // namespace tessera
