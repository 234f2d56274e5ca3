// What fully_shard and replicate refuse on top of tensor parallelism, and what they recover from.

#include <ATen/ops/ones.h>

#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "nn/normalization.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/tensor_parallel_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("after a forward that threw, training on both meshes goes on", "[tensor_parallel]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto reference = make_branch(), branch = make_branch();
    parallelize_branch(branch, mesh["tp"]);
    fully_shard(branch->always, {.mesh = mesh["dp"], .reshard_after_forward = false});
    fully_shard(branch, {.mesh = mesh["dp"]});
    const auto dp_rank = mesh.local_rank("dp");
    average_reference(*reference, 2, [&](int rank) { loss_of(reference, rank).backward(); });
    auto failing = hook_point(*branch->sometimes, "test").register_forward_pre_hook([](HookPoint&, TensorRefs) {
      throw std::runtime_error("on purpose");
    });
    expect_throws<std::runtime_error>([&] { loss_of(branch, dp_rank); }, "on purpose");
    failing.remove();
    fsdp(branch).reset_iter_state();
    expect_equal(fsdp(branch->always).unsharded_bytes(), 0u);
    expect_equal(fsdp(branch).unsharded_bytes(), 0u);
    loss_of(branch, dp_rank).backward();
    check_sharded_parity(reference, branch, {.tolerance = {.rtol = 1e-5, .atol = 1e-6}});
  });
}

TEST_CASE("a plain parameter that gets a DTensor as its gradient is named, with what to do about it",
          "[tensor_parallel]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    tessera::nn::LayerNorm norm(torch::nn::LayerNormOptions({5}));
    fully_shard(norm, {.mesh = mesh["dp"]});
    const auto tp = mesh["tp"];
    norm->weight.register_hook([tp](const at::Tensor& grad) { return distribute_tensor(grad, tp, {Replicate()}); });
    for (int step = 0; step < 2; ++step) {
      const auto loss = norm(at::ones({3, 5})).sum();
      expect_throws<StateError>([&] { loss.backward(); }, "is a DTensor on DeviceMesh(cpu, {tp: 2})");
      TESSERA_EXPECT(!norm->weight.grad().defined() && !norm->bias.grad().defined());
    }
  });
}

TEST_CASE("plain parameters that forward uses beside DTensors, in an ImplicitReplication scope, are trained",
          "[tensor_parallel]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    tessera::nn::LayerNorm reference(torch::nn::LayerNormOptions({5})), norm(torch::nn::LayerNormOptions({5}));
    fully_shard(norm, {.mesh = mesh["dp"]});
    const auto batch_of = [](int64_t dp_rank) { return make_batch(static_cast<uint64_t>(dp_rank), 3, 5); };
    for (int64_t dp_rank = 0; dp_rank < 2; ++dp_rank) {
      (reference(batch_of(dp_rank)).square().sum() / 2).backward();
    }
    at::Tensor loss;
    {
      const ImplicitReplication scope;
      loss = norm(distribute_tensor(batch_of(mesh.local_rank("dp")), mesh["tp"], {Shard(0)})).square().sum();
    }
    loss.backward();
    check_sharded_parity(reference, norm, {.tolerance = {.rtol = 1e-5, .atol = 1e-6}});
  });
}

TEST_CASE("an ignored parameter stays as tensor parallelism left it, and its gradient is the rank's own",
          "[tensor_parallel]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto reference = make_branch(), branch = make_branch();
    parallelize_branch(branch, mesh["tp"]);
    const auto ignored = branch->always->up->weight;
    fully_shard(branch, {.mesh = mesh["dp"], .ignored_params = {ignored}});
    expect_equal(dtensor_spec(ignored)->to_string(), "Float[7, 5] (Shard(0)) on DeviceMesh(cpu, {tp: 2})");
    const auto dp_rank = mesh.local_rank("dp");
    loss_of(branch, dp_rank).backward();
    loss_of(reference, dp_rank).backward();
    expect_close(full_tensor(ignored.grad()), reference->always->up->weight.grad());
    average_reference(*reference, 2, [&](int rank) { loss_of(reference, rank).backward(); });
    expect_close(full_tensor(branch->always->down->weight.grad()), reference->always->down->weight.grad());
  });
}

TEST_CASE("parameters on both meshes that were replaced stop the ranks that gather them", "[tensor_parallel]") {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto block = make_block();
    parallelize_block(block, mesh["tp"]);
    fully_shard(block, {.mesh = mesh["dp"]});
    // Both ranks along tp replace it, as to() does on every rank, but only where dp is 0.
    if (mesh.local_rank("dp") == 0) {
      block->to(at::kDouble);
    }
    const auto use = [&] { block(make_batch(static_cast<uint64_t>(rank), 3, 5)); };
    if (mesh.local_rank("dp") == 0) {
      expect_throws<StateError>(use, "the data of parameter 'up.weight' of");
    } else {
      expect_throws<StateError>(use, "rank 0: 'root', whose parameters were replaced");
    }
  });
}

TEST_CASE("meshes that do not go together, and Partial parameters, are refused on every rank", "[tensor_parallel]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto block = make_block();
    parallelize_block(block, mesh["tp"]);
    const auto same_axis = [&] { fully_shard(block, {.mesh = mesh["tp"]}); };
    const std::string where = "fully_shard(tessera::testing::BlockImpl): parameter 'up.weight' is a DTensor, ";
    const std::string spec = "Float[7, 5] (Shard(0)) on DeviceMesh(cpu, {tp: 2}), but ";
    expect_throws<ValueError>(same_axis, where + spec +
                                             "DeviceMesh(cpu, {tp: 2}) and DeviceMesh(cpu, {tp: 2}) overlap; each axis "
                                             "of DeviceMesh(cpu, {dp: 2, tp: 2}) either shards by tensor parallelism "
                                             "or carries data");
    const auto other = init_device_mesh(at::kCPU, {4}, {"data"});
    const auto other_root = [&] { fully_shard(block, {.mesh = other}); };
    expect_throws<ValueError>(other_root, where + spec +
                                              "DeviceMesh(cpu, {data: 4}) and DeviceMesh(cpu, {tp: 2}) are not parts "
                                              "of one mesh (their roots are DeviceMesh(cpu, {data: 4}) and "
                                              "DeviceMesh(cpu, {dp: 2, tp: 2})); take both from one, as mesh[\"dp\"] "
                                              "and mesh[\"tp\"]");
    expect_throws<ValueError>([&] { fully_shard(block); }, "are not parts of one mesh");
    expect_throws<ValueError>([&] { replicate(block, {.mesh = other}); }, "are not parts of one mesh");

    auto partial = make_block();
    partial->up->weight.set_data(from_local(partial->up->weight.detach(), mesh["tp"], {Partial()}));
    expect_throws<ValueError>([&] { fully_shard(partial, {.mesh = mesh["dp"]}); },
                              where +
                                  "Float[7, 5] (Partial(Sum)) on DeviceMesh(cpu, {tp: 2}), whose ranks hold terms of a "
                                  "sum and no values; distribute it as Shard or Replicate");
  });
}

TEST_CASE("what one rank cannot do, its neighbours along both meshes refuse too", "[tensor_parallel]") {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto block = make_block();
    parallelize_block(block, mesh["tp"]);
    if (rank == 1) {
      block->up->bias.mutable_grad() = at::ones({7});
    }
    const auto shard = [&] { fully_shard(block, {.mesh = mesh["dp"]}); };
    if (rank == 1) {
      expect_throws<StateError>(shard, "'up.bias' has a gradient already");
    } else {
      expect_throws<ValueError>(shard, "rank 1 cannot: fully_shard(");
    }
    block->zero_grad();
    shard();
    weighted_loss(block(make_batch(1, 3, 5))).backward();
  });
}

TEST_CASE("a sharded parameter that meets DTensors on tp is named with the remedy", "[tensor_parallel]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto block = make_block();
    parallelize_block(block, mesh["tp"]);
    fully_shard(block, {.mesh = mesh["dp"]});
    const auto use = [&] { block->up(make_batch(1, 3, 5)); };
    expect_throws<StateError>(use, "is sharded, but it meets tensors that are not: Float[");
    expect_throws<StateError>(use, "fsdp(module).unshard()");
  });
}

}  // namespace tessera::testing
