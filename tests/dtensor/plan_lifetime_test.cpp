// What cached plans keep alive.

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <vector>

#include "comm/context/rank_context.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"
#include "dtensor/register_sharding.h"
#include "testing/expect.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera {

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

/// An op whose kernel makes the thread's cache drop all plans, that of its own call among them.
at::Tensor twice_after_another_run(const at::Tensor& x) {
  const RankContextGuard guard(RankContext::create());
  group_of_a_run();
  return x * 2;
}

at::Tensor twice_meta(const at::Tensor& x) {
  return at::empty_like(x);
}

TORCH_LIBRARY(plan_lifetime, library) {
  library.def("twice(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(plan_lifetime, CPU, library) {
  library.impl("twice", &twice_after_another_run);
}

TORCH_LIBRARY_IMPL(plan_lifetime, Meta, library) {
  library.impl("twice", &twice_meta);
}

}  // namespace

TEST_CASE("the groups of a process group that ended are freed by the next one's first ops", "[dtensor]") {
  const RankContextGuard guard(RankContext::create());
  const auto first = group_of_a_run();
  group_of_a_run();
  CHECK(first.expired());
}

TEST_CASE("a program that makes meshes in a loop keeps the groups of the last ones only", "[dtensor]") {
  const RankContextGuard guard(RankContext::create());
  init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> groups;
  for (int i = 0; i < 200; ++i) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 1});  // along axis 1 there is a group for each
    const auto x = from_local(at::ones({3}), mesh, {Replicate(), Shard(0)});
    CHECK(to_local(x + x)[0].item<float>() == 2);
    groups.emplace_back(mesh.group(1));
  }
  const auto kept = std::count_if(groups.begin(), groups.end(), [](const auto& group) { return !group.expired(); });
  CHECK(kept > 0);
  CHECK(kept <= 64);
  destroy_process_group();
}

TEST_CASE("a plan that the cache drops while its op runs stays valid until the op has returned", "[dtensor]") {
  const RankContextGuard guard(RankContext::create());
  init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  register_sharding("plan_lifetime::twice",
                    [](const OpCall&) -> Strategies { return {{.operands = {Shard(0)}, .outputs = {Shard(0)}}}; });
  const auto x = from_local(at::ones({3}), init_device_mesh(at::kCPU, {2}), {Shard(0)});
  const auto twice = c10::Dispatcher::singleton().findSchemaOrThrow("plan_lifetime::twice", "");
  for (int call = 0; call < 3; ++call) {
    const auto y = twice.typed<at::Tensor(const at::Tensor&)>().call(x);
    expect_equal(to_string(placements(y)), "(Shard(0))");
    expect_bit_equal(to_local(y), at::full({3}, 2.0F));
  }
  destroy_process_group();
}

}  // namespace tessera
