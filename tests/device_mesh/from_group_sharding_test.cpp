// DTensors and fully_shard over a mesh of groups that are there already.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "device_mesh/device_mesh.h"
#include "dtensor/dtensor.h"
#include "fsdp1/fsdp.h"
#include "fully_shard/fully_shard.h"
#include "nn/linear.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

TEST_CASE("DTensors and fully_shard over such meshes") {
  run_ranks(5, [](int rank) {
    if (rank == 0) {
      return;
    }
    const DeviceMesh places = init_device_mesh(at::kCPU, {2, 2}, {}, {4, 2, 3, 1});
    const DeviceMesh mesh = DeviceMesh::from_group({places.group(0), places.group(1)}, at::kCPU, {"dp", "tp"});
    const at::Tensor whole = at::randn({5, 3}, make_generator(1));
    const at::Tensor cut = distribute_tensor(whole, mesh, {Shard(0), Shard(1)});
    expect_bit_equal(full_tensor(cut), whole);
    expect_bit_equal(full_tensor(redistribute(cut, {Shard(1), Shard(0)})), whole);

    nn::Linear reference(3, 5), sharded(3, 5);
    {
      const at::NoGradGuard no_grad;
      reference->weight.copy_(whole);
      reference->bias.fill_(0.5);
      sharded->weight.copy_(reference->weight);
      sharded->bias.copy_(reference->bias);
    }
    fully_shard(sharded, {.mesh = mesh["dp"]});
    const at::Tensor input = at::randn({4, 3}, make_generator(2));
    reference(input).pow(2).sum().backward();
    sharded(input).pow(2).sum().backward();
    check_sharded_parity(reference, sharded);
  });
}

TEST_CASE("results are on the groups of their operands' mesh, also where another mesh is equal") {
  run_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const DeviceMesh other = DeviceMesh::from_group(new_group({0, 1}, "other"), at::kCPU, "dp");
    const at::Tensor x = distribute_tensor(at::ones({3}), mesh, {Shard(0)});
    const at::Tensor y = distribute_tensor(at::ones({3}), other, {Shard(0)});
    for (int i = 0; i < 2; ++i) {
      TESSERA_EXPECT(device_mesh(x.relu()).shares_groups_with(mesh));
      TESSERA_EXPECT(device_mesh(y.relu()).shares_groups_with(other));
      TESSERA_EXPECT(!device_mesh(y.relu()).shares_groups_with(mesh));
    }
  });
}

TEST_CASE("the first rank of a mesh without rank 0 has what rank0_only gives") {
  run_ranks(3, [](int rank) {
    if (rank == 0) {
      return;
    }
    nn::Linear linear(3, 5);
    const FullyShardedDataParallel wrapped(linear, {.device_mesh = init_device_mesh(at::kCPU, {2}, {"dp"}, {1, 2})});
    FSDP::set_state_dict_type(*linear, StateDictSettings::make(StateDictType::FULL_STATE_DICT,
                                                               FullStateDictConfig{.rank0_only = true}, std::nullopt));
    expect_equal(FSDP::state_dict(*linear).size(), size_t{rank == 1 ? 2u : 0u});
    FSDP::summon_full_params(*linear, {.writeback = false, .rank0_only = true},
                             [&] { expect_equal(is_dtensor(linear->weight), rank == 2); });
  });
}

}  // namespace
}  // namespace tessera
