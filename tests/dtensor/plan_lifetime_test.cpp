// What cached plans keep alive.

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/process_group.h"
#include "comm/rank_context.h"
#include "dtensor/dtensor.h"
#include "third_party/catch2/catch.h"

using namespace tessera;

namespace {

/// Sets up a group, runs an op on a mesh of it and ends it; the mesh's own group.
c10::weak_intrusive_ptr<c10d::ProcessGroup> group_of_a_run() {
  init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  const auto mesh = init_device_mesh(at::kCPU, {2});
  const auto x = from_local(at::ones({3}), mesh, {Shard(0)});
  CHECK(to_local(x + x)[0].item<float>() == 2);
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group(mesh.group());
  destroy_process_group();
  return group;
}

}  // namespace

TEST_CASE("the groups of a process group that ended are freed by the next one's first ops", "[dtensor]") {
  const RankContextGuard guard(RankContext::create());
  const auto first = group_of_a_run();
  group_of_a_run();
  CHECK(first.expired());
}
