// A unit whose parameters tensor parallelism cut: its states, memory, communication and precision.

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include "debug/comm_debug_mode.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "parallel/distribute_module.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/tensor_parallel_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// The one layer that parallelize_tower leaves plain, as copies over tp.
void distribute_in(Tower& tower, const DeviceMesh& tp) {
  distribute_module(tower->in, tp,
                    {.input_fn = [](torch::nn::Module&, TensorRefs inputs,
                                    const DeviceMesh& on) { *inputs[0] = from_local(*inputs[0], on, {Replicate()}); },
                     .output_fn = [](torch::nn::Module&, TensorRefs outputs,
                                     const DeviceMesh&) { *outputs[0] = full_tensor(*outputs[0]); }});
}

std::vector<at::Tensor> gradients_of(Tower& tower) {
  std::vector<at::Tensor> grads;
  for (const auto& param : tower->parameters()) {
    grads.push_back(param.grad());
  }
  return grads;
}

}  // namespace

TEST_CASE("sharded, a parameter lies on both meshes; in forward it is the DTensor on tp again", "[tensor_parallel]") {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    const int64_t tp_rank = rank % 2;
    auto block = make_block();
    const auto up = block->up->weight.detach().clone();
    parallelize_block(block, mesh["tp"]);
    const auto weight = block->up->weight;
    const auto spec_on_tp = dtensor_spec(weight)->to_string();
    fully_shard(block, {.mesh = mesh["dp"]});

    TESSERA_EXPECT(weight.is_same(block->up->weight));
    expect_equal(dtensor_spec(weight)->to_string(),
                 "Float[7, 5] (Shard(0, 1), Shard(0)) on DeviceMesh(cpu, {dp: 2, tp: 2})");
    expect_equal(to_string(placements(block->down->weight)), "(Shard(0), Shard(1))");
    expect_equal(to_string(placements(block->down->bias)), "(Shard(0), Replicate())");
    // tp cuts 7 rows into 4 and 3, dp then these into 2 and 2, 2 and 1.
    const int64_t first[] = {0, 4, 2, 6}, rows[] = {2, 2, 2, 1};
    expect_bit_equal(to_local(weight.detach()), up.narrow(0, first[rank], rows[rank]));
    expect_bit_equal(full_tensor(weight.detach()), up);

    std::string spec_in_forward;
    at::Tensor local_in_forward;
    size_t bytes_in_forward = 0;
    hook_point(*block, "test").register_forward_pre_hook([&](HookPoint&, TensorRefs) {
      spec_in_forward = dtensor_spec(weight)->to_string();
      local_in_forward = to_local(weight.detach()).clone();
      bytes_in_forward = fsdp(block).unsharded_bytes();
    });
    auto loss = weighted_loss(block(make_batch(1, 3, 5)));
    expect_equal(spec_in_forward, spec_on_tp);
    expect_bit_equal(local_in_forward, up.narrow(0, tp_rank * 4, tp_rank == 0 ? 4 : 3));
    const size_t hidden = tp_rank == 0 ? 4 : 3;
    expect_equal(bytes_in_forward, (hidden * 5 + hidden + 5 * hidden + 5) * sizeof(float));
    fsdp(block).reshard();
    expect_equal(fsdp(block).unsharded_bytes(), 0u);
    expect_equal(fsdp(block).memory_stats().acquired, 0u);
    loss.backward();
    expect_equal(fsdp(block).unsharded_bytes(), 0u);
    TESSERA_EXPECT(dtensor_spec(weight.grad()) == dtensor_spec(weight));
  });
}

TEST_CASE("a unit gathers once over dp, and tensor parallelism communicates as it does alone", "[tensor_parallel]") {
  run_ranks(6, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3, 2}, {"dp", "tp"});
    Tower tower(6, 12, 2);
    for (auto& block : tower->blocks) {
      parallelize_block(block, mesh["tp"]);
      fully_shard(block, {.mesh = mesh["dp"], .reshard_after_forward = true});
    }
    fully_shard(tower, {.mesh = mesh["dp"]});
    auto batch = make_batch(1, 3, 5);
    tower(batch).sum().backward();

    CommDebugMode forward;
    auto loss = tower(batch).sum();
    expect_equal(forward.calls(Collective::AllGather), 3);  // the units: two blocks and the root
    expect_equal(forward.calls(Collective::AllReduce), 2);  // after each block's down
    expect_equal(forward.calls(), 5);
    // A block's local weights, 6 x 6 and 6 + 6 x 6 and 6, cut over dp (12, 2, 12, 2) in slots of 16, 8, 16, 8 and the
    // tag of 8 elements, go to two peers. The root's slots: 16 (10), 8 (2), 8 (2), 8 (2), 8 (6), 8 (1).
    const auto bytes_of = [](const CommDebugMode& mode, Collective kind) {
      int64_t bytes = 0;
      for (const auto& [key, entry] : mode.entries()) {
        bytes += key.collective == kind ? entry.bytes_sent : 0;
      }
      return bytes;
    };
    expect_equal(bytes_of(forward, Collective::AllGather), 2 * 4 * (2 * (16 + 8 + 16 + 8 + 8) + (56 + 8)));
    CommDebugMode backward;
    loss.backward();
    expect_equal(backward.calls(Collective::AllGather), 2);  // the blocks; the root's parameters stayed
    expect_equal(backward.calls(Collective::ReduceScatter), 3);
    expect_equal(backward.calls(Collective::AllReduce), 2);  // before each block's up
    expect_equal(backward.calls(), 7);
  });
}

TEST_CASE("a gradient that autograd leaves as terms along tp is summed there", "[tensor_parallel]") {
  const bool syncs = GENERATE(true, false);
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    Tower reference(3, 4, 1), tower(3, 4, 1);
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    parallelize_tower(tower, mesh["tp"]);
    std::string accumulated;
    tower->norm->weight.register_hook([&](at::Tensor grad) { accumulated = to_string(placements(grad)); });
    shard_tower(tower, {.mesh = mesh["dp"]});
    const auto loss = [](Tower& of, int64_t rank, int64_t micro) {
      return weighted_loss(of(make_batch(static_cast<uint64_t>(10 * rank + micro), 3, 5)));
    };
    const auto dp_rank = mesh.local_rank("dp");
    fsdp(tower).set_requires_gradient_sync(syncs);
    loss(tower, dp_rank, 0).backward();
    expect_equal(accumulated, "(Partial(Sum))");
    if (!syncs) {
      TESSERA_EXPECT(!tower->norm->weight.grad().defined());
      fsdp(tower).set_requires_gradient_sync(true);
    }
    loss(tower, dp_rank, 1).backward();
    average_reference(*reference, 2, [&](int rank) {
      loss(reference, rank, 0).backward();
      loss(reference, rank, 1).backward();
    });
    check_sharded_parity(reference, tower, {.tolerance = {.rtol = 1e-5, .atol = 1e-6}});
  });
}

TEST_CASE("backward without sync communicates over tp only", "[tensor_parallel]") {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto branch = make_branch();
    parallelize_branch(branch, mesh["tp"]);
    fully_shard(branch, {.mesh = mesh["dp"]});
    fsdp(branch).set_requires_gradient_sync(false);
    auto loss = loss_of(branch, rank / 2);
    CommDebugMode mode;
    loss.backward();
    expect_equal(mode.calls(), 1);
    expect_equal(mode.calls(Collective::AllReduce), 1);  // before the second block's up: the batch needs no gradient
  });
}

TEST_CASE("tensor-parallel parameters that only some ranks of dp use, or none", "[tensor_parallel]") {
  const int users = GENERATE(0, 1, 2);
  CAPTURE(users);
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto reference = make_branch(), branch = make_branch();
    parallelize_branch(branch, mesh["tp"]);
    fully_shard(branch, {.mesh = mesh["dp"]});
    average_reference(*reference, 2, [&](int rank) { loss_of(reference, rank, rank < users).backward(); });
    const auto dp_rank = mesh.local_rank("dp");
    loss_of(branch, dp_rank, dp_rank < users).backward();
    expect_equal(branch->sometimes->up->weight.grad().defined(), users > 0);
    check_sharded_parity(reference, branch, {.tolerance = {.rtol = 1e-5, .atol = 1e-6}});
  });
}

TEST_CASE("mixed precision: tensor parallelism computes in bfloat16 too", "[tensor_parallel]") {
  const bool replicates = GENERATE(false, true);
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto reference = make_block(), block = make_block();
    parallelize_block(block, mesh["tp"]);
    const MixedPrecisionPolicy policy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    if (replicates) {
      replicate(block, {.mesh = mesh["dp"], .mp_policy = policy});
    } else {
      fully_shard(block, {.mesh = mesh["dp"], .mp_policy = policy});
    }
    std::string in_forward;
    hook_point(*block, "test").register_forward_pre_hook([&](HookPoint&, TensorRefs) {
      in_forward = dtensor_spec(block->up->weight)->to_string();
    });
    torch::optim::SGD optimizer(block->parameters(), 0.1), reference_optimizer(reference->parameters(), 0.1);
    const auto loss = [](Block& of, int64_t rank) {
      return weighted_loss(of(make_batch(static_cast<uint64_t>(rank), 3, 5)).to(at::kFloat));
    };
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      average_reference(*reference, 2, [&](int rank) { loss(reference, rank).backward(); });
      loss(block, mesh.local_rank("dp")).backward();
      expect_equal(in_forward, "BFloat16[7, 5] (Shard(0)) on DeviceMesh(cpu, {tp: 2})");
      TESSERA_EXPECT(block->up->weight.grad().scalar_type() == at::kFloat);
      check_sharded_parity(reference, block, {.tolerance = {.rtol = 0.05, .atol = 0.02}});
      optimizer.step();
      reference_optimizer.step();
    }
    expect_equal(fsdp(block).unsharded_bytes(), 0u);
  });
}

TEST_CASE("replicated parameters under tensor parallelism are used where they are", "[tensor_parallel]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto block = make_block();
    parallelize_block(block, mesh["tp"]);
    replicate(block, {.mesh = mesh["dp"]});
    const auto& weight = block->up->weight;
    const auto* memory = to_local(weight.detach()).const_data_ptr();
    const void* used = nullptr;
    hook_point(*block, "test").register_forward_pre_hook([&](HookPoint&, TensorRefs) {
      expect_equal(to_string(placements(weight)), "(Shard(0))");
      used = to_local(weight.detach()).const_data_ptr();
    });
    weighted_loss(block(make_batch(1, 3, 5))).backward();
    TESSERA_EXPECT(used == memory);
    expect_equal(fsdp(block).memory_stats().held, 0u);
    expect_equal(to_string(placements(weight.grad())), "(Replicate(), Shard(0))");
  });
}

TEST_CASE("clip_grad_norm_ and foreach ops over gradients on both meshes", "[tensor_parallel]") {
  const double type = GENERATE(1.0, 2.0, std::numeric_limits<double>::infinity());
  const bool is_mixed = GENERATE(false, true);  // some parameters are on dp alone
  run_ranks(8, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"replicate", "dp", "tp"});
    const auto dp = mesh[{"replicate", "dp"}];
    Tower reference(3, 5, 1), tower(3, 5, 1);
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    parallelize_tower(tower, mesh["tp"]);
    if (!is_mixed) {
      distribute_in(tower, mesh["tp"]);
    }
    shard_tower(tower, {.mesh = dp});
    const auto loss = [](Tower& of, int64_t rank) {
      return weighted_loss(of(make_batch(static_cast<uint64_t>(rank), 3, 5)));
    };
    average_reference(*reference, 4, [&](int rank) { loss(reference, rank).backward(); });
    loss(tower, dp.local_rank()).backward();
    const double expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.05, type);
    const double norm = is_mixed ? clip_grad_norm_(tower->parameters(), 0.05, {.norm_type = type}).item<double>()
                                 : torch::nn::utils::clip_grad_norm_(tower->parameters(), 0.05, type);
    TESSERA_EXPECT(expected > 0.05);
    TESSERA_EXPECT(std::abs(norm - expected) < 1e-5 * expected);
    check_sharded_parity(reference, tower, {.tolerance = {.rtol = 1e-5, .atol = 1e-6}});
    if (is_mixed) {
      return;
    }
    auto grads = gradients_of(tower), expected_grads = gradients_of(reference);
    at::_foreach_mul_(grads, 3);
    at::_foreach_mul_(expected_grads, 3);
    check_sharded_parity(reference, tower, {.tolerance = {.rtol = 1e-5, .atol = 1e-6}});
    const auto norms = at::_foreach_norm(grads, type), expected_norms = at::_foreach_norm(expected_grads, type);
    for (size_t i = 0; i < norms.size(); ++i) {
      expect_close(full_tensor(norms[i]), expected_norms[i], {.rtol = 1e-5, .atol = 1e-6});
    }
  });
}

}  // namespace tessera::testing
