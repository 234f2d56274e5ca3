// Units whose parameters have several dtypes, of which the trained ones have one: equal to one process.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/adamw.h>

#include <optional>

#include "checkpoint/checkpoint.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/dtensor.h"
#include "fully_shard/clone_sharded.h"
#include "fully_shard/replicate.h"
#include "fully_shard/to_empty.h"
#include "nn/meta_device.h"
#include "optim/fused_optimizers.h"
#include "testing/expect.h"
#include "testing/fsdp_models/patches.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/lora_models.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

const ParityOptions kClose{.tolerance = {.rtol = 1e-4, .atol = 1e-5}};

at::Tensor loss_of(Lora& lora, int batch) {
  return weighted_loss(lora(make_batch(static_cast<uint64_t>(batch), 3, 5)).to(at::kFloat));
}

void shard_lora(Lora& lora, const FullyShardOptions& options = {}) {
  for (auto& block : lora->blocks) {
    fully_shard(block, options);
  }
  fully_shard(lora, options);
}

void replicate_lora(Lora& lora, const ReplicateOptions& options = {}) {
  for (auto& block : lora->blocks) {
    replicate(block, options);
  }
  replicate(lora, options);
}

/// Adapters and the first layer, or all that they are beside.
void train_only(Lora& lora, bool adapters) {
  for (auto& param : lora->parameters()) {
    if (param.is_floating_point()) {
      param.set_requires_grad((param.scalar_type() == at::kFloat) == adapters);
    }
  }
}

/// Three steps on batches of one's own, against one process.
struct Training {
  int rank, world_size, shard_ranks;
  ParityOptions parity = kExact;
  int steps = 3;

  void run(Lora& reference, Lora& sharded) const { run_with<torch::optim::AdamW>(reference, sharded); }
  /// Whose rounding depends on how many elements a rank has.
  void run_fused(Lora& reference, Lora& sharded) const { run_with<optim::FusedAdamW>(reference, sharded); }

  template <class Optimizer>
  void run_with(Lora& reference, Lora& sharded) const {
    Optimizer reference_optimizer(reference->parameters(), torch::optim::AdamWOptions(1e-2));
    Optimizer optimizer(sharded->parameters(), torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < steps; ++step) {
      const auto run_rank = [&](int r) { loss_of(reference, 10 * step + r).backward(); };
      average_reference(*reference, world_size, run_rank, shard_ranks);
      const auto expected = loss_of(reference, 10 * step + rank).detach();
      optimizer.zero_grad();
      const auto loss = loss_of(sharded, 10 * step + rank);
      expect_close(loss.detach(), expected, parity.tolerance);
      loss.backward();
      check_sharded_parity(reference, sharded, parity);
      const auto norm = clip_grad_norm_(sharded->parameters(), 1e6);
      expect_close(norm, clip_grad_norm_(reference->parameters(), 1e6), {.rtol = 1e-5, .atol = 1e-6});
      optimizer.step();
      reference_optimizer.step();
      check_sharded_parity(reference, sharded, parity);
    }
  }
};

}  // namespace

TEST_CASE("frozen parameters of other dtypes are gathered with those that are trained", "[mixed]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const auto reshard = GENERATE(ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2));
  const bool in_place = GENERATE(true, false);
  const int64_t dim = GENERATE(17, 2);
  const bool offloads = GENERATE(false, true);
  if (reshard.group_size() && world_size % 2 != 0) {
    return;
  }
  CAPTURE(world_size, reshard.to_string(), in_place, dim, offloads);
  run_ranks(world_size, [&](int rank) {
    auto reference = make_lora(dim, dim - 1), sharded = make_lora(dim, dim - 1);
    const auto offload = offloads ? std::optional(CPUOffloadPolicy{}) : std::nullopt;
    shard_lora(sharded, {.reshard_after_forward = reshard, .offload_policy = offload});
    TESSERA_EXPECT(to_local(sharded->out->weight).scalar_type() == at::kBFloat16);
    const Training training{.rank = rank, .world_size = world_size, .shard_ranks = world_size};
    if (in_place) {
      training.run(reference, sharded);
      return;
    }
    // A function of one's own sends one buffer.
    int gathers = 0;
    const auto patch = patch_all_gather([&](const AllGatherFn& original, const at::Tensor& output,
                                            const at::Tensor& input, const ProcessGroupPtr& group) {
      ++gathers;
      TESSERA_EXPECT(input.scalar_type() == at::kByte);
      return original(output, input, group);
    });
    training.run(reference, sharded);
    const bool again = reshard.is_on() && (!reshard.group_size() || world_size >= 2);
    const int a_step = again ? 6 : 3;
    expect_equal(gathers, world_size == 1 ? 0 : training.steps * a_step);
  });
}

TEST_CASE("frozen parameters of other dtypes beside replicas", "[mixed]") {
  const int kind = GENERATE(0, 1, 2, 3);
  CAPTURE(kind);
  run_ranks(4, [&](int rank) {
    auto reference = make_lora(), sharded = make_lora();
    Training training{.rank = rank, .world_size = 4, .shard_ranks = kind == 0 ? 2 : 1};
    if (kind == 0) {
      shard_lora(sharded, {.mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"})});
    } else if (kind == 1) {
      replicate_lora(sharded);
    } else if (kind == 2) {
      replicate(sharded, {.bucket_cap_mb = 0.0001});  // in parts
    } else {
      replicate_lora(sharded, {.offload_policy = CPUOffloadPolicy{}, .bucket_cap_mb = 0});
    }
    training.run(reference, sharded);
  });
}

TEST_CASE("frozen parameters of other dtypes on top of tensor parallelism", "[mixed]") {
  const bool shards = GENERATE(true, false);
  run_ranks(4, [&](int rank) {
    // In float64, since ranks that add up terms in bfloat16 round more often than one process does.
    auto reference = make_lora(17, 13, at::kDouble), sharded = make_lora(17, 13, at::kDouble);
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    parallelize_lora(sharded, mesh["tp"]);
    if (shards) {
      shard_lora(sharded, {.mesh = mesh["dp"]});
    } else {
      replicate_lora(sharded, {.mesh = mesh["dp"]});
    }
    const Training training{.rank = rank / 2, .world_size = 2, .shard_ranks = shards ? 2 : 1, .parity = kClose};
    training.run_fused(reference, sharded);
  });
}

TEST_CASE("parameters of several dtypes under mixed precision: bytes stay bytes", "[mixed]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const auto reshard = GENERATE(ReshardAfterForward(true), ReshardAfterForward(2));
  if (reshard.group_size() && world_size % 2 != 0) {
    return;
  }
  run_ranks(world_size, [&](int rank) {
    auto reference = make_lora(), sharded = make_lora();
    shard_lora(sharded, {.reshard_after_forward = reshard, .mp_policy = {.param_dtype = at::kBFloat16}});
    for (auto& param : reference->parameters()) {
      if (param.is_floating_point()) {
        param.set_data(param.to(at::kBFloat16));
      }
    }
    auto hook = hook_point(*sharded->blocks[1]->up, "test").register_forward_pre_hook([&](HookPoint&, TensorRefs) {
      TESSERA_EXPECT(sharded->blocks[1]->codes.scalar_type() == at::kByte);
      TESSERA_EXPECT(sharded->blocks[1]->up->lora_a.scalar_type() == at::kBFloat16);
    });
    for (int step = 0; step < 2; ++step) {
      std::vector<at::Tensor> sums;
      at::Tensor expected;
      const auto batch = [&](int r) { return make_batch(static_cast<uint64_t>(10 * step + r), 3, 5); };
      for (int r = 0; r < world_size; ++r) {
        reference->zero_grad();
        const auto loss = weighted_loss(reference(batch(r).to(at::kBFloat16)).to(at::kFloat));
        loss.backward();
        expected = r == rank ? loss.detach() : expected;
        size_t i = 0;
        for (const auto& param : reference->parameters()) {
          if (param.requires_grad()) {
            const auto grad = param.grad().to(at::kFloat);
            r == 0 ? sums.push_back(grad) : static_cast<void>(sums[i].add_(grad));
            ++i;
          }
        }
      }
      sharded->zero_grad();
      const auto loss = loss_of(sharded, 10 * step + rank);
      expect_bit_equal(loss.detach(), expected);
      loss.backward();
      size_t i = 0;
      for (const auto& param : sharded->parameters()) {
        if (param.requires_grad()) {
          expect_bit_equal(full_tensor(param.grad()), sums[i++] / world_size);
        } else {
          TESSERA_EXPECT(!param.grad().defined());
        }
      }
    }
  });
}

TEST_CASE("which parameters of a unit of several dtypes are trained may change", "[mixed]") {
  const int world_size = GENERATE(1, 2, 3);
  const bool syncs_first = GENERATE(true, false);
  run_ranks(world_size, [&](int rank) {
    auto reference = make_lora(), sharded = make_lora();
    for (auto* model : {&reference, &sharded}) {
      for (auto& param : (*model)->parameters()) {
        param.set_requires_grad(false);
      }
    }
    shard_lora(sharded);
    for (const bool adapters : {true, false, true}) {
      for (auto* model : {&reference, &sharded}) {
        train_only(*model, adapters);
      }
      const auto twice = [&](Lora& model, int r) {
        loss_of(model, r).backward();
        loss_of(model, 10 + r).backward();
      };
      average_reference(*reference, world_size, [&](int r) { twice(reference, r); });
      sharded->zero_grad();
      fsdp(sharded).set_requires_gradient_sync(syncs_first);
      loss_of(sharded, rank).backward();
      fsdp(sharded).set_requires_gradient_sync(true);
      loss_of(sharded, 10 + rank).backward();
      const bool is_exact = !syncs_first && adapters;
      check_sharded_parity(reference, sharded,
                           {.tolerance = is_exact ? kExact.tolerance : Tolerance{.rtol = 2e-2, .atol = 1e-3}});
      for (const auto& param : sharded->parameters()) {
        TESSERA_EXPECT(!param.grad().defined() || param.grad().scalar_type() == param.scalar_type());
      }
    }
  });
}

TEST_CASE("trained parameters of two dtypes in one unit are refused by name, also later", "[mixed]") {
  run_ranks(2, [](int rank) {
    auto lora = make_lora();
    lora->blocks[0]->down->weight.set_requires_grad(true);
    const std::string_view together = "need one dtype, but 'up.lora_a' is Float and 'down.weight' is BFloat16";
    expect_throws<ValueError>([&] { fully_shard(lora->blocks[0]); }, together);
    lora->blocks[0]->down->weight.set_requires_grad(false);
    shard_lora(lora);
    auto& weight = lora->blocks[0]->down->weight;
    weight.set_requires_grad(true);
    expect_throws<StateError>([&] { loss_of(lora, rank).backward(); }, "'up.lora_a' in Float and 'down.weight' in");
    weight.set_requires_grad(false);
    auto reference = make_lora();
    lora->zero_grad();
    Training{.rank = rank, .world_size = 2, .shard_ranks = 2}.run(reference, lora);
  });
}

TEST_CASE("ranks that freeze different parameters are refused by name", "[mixed]") {
  run_ranks(3, [](int rank) {
    Tower tower;
    tower->norm->weight.set_requires_grad(rank != 1);
    expect_throws<ValueError>([&] { fully_shard(tower); }, "'norm.weight' Float[17] Shard(0), frozen");
  });
}

TEST_CASE("units of several dtypes in checkpoints, and in models without memory", "[mixed]") {
  TempFolder folder;
  run_ranks(3, [&](int rank) {
    auto reference = make_lora(), trained = make_lora();
    shard_lora(trained);
    Training{.rank = rank, .world_size = 3, .shard_ranks = 3}.run(reference, trained);
    dcp::save(folder.path("a"), {.model = dcp::get_model_state_dict(*trained)});

    auto empty = [] {
      const MetaDeviceGuard on_meta;
      return Lora(17, 13);
    }();
    for (auto& block : empty->blocks) {
      for (auto* linear : {&block->up, &block->down}) {
        (*linear)->weight.set_data((*linear)->weight.to(at::kBFloat16));
      }
    }
    empty->out->weight.set_data(empty->out->weight.to(at::kBFloat16));
    shard_lora(empty, {.mesh = init_device_mesh(at::kCPU, {3})});
    const at::NoGradGuard no_grad;
    expect_throws<StateError>([&] { loss_of(empty, rank); }, "is still on the meta device");
    to_empty(empty, at::kCPU);
    dcp::State state{.model = dcp::get_model_state_dict(*empty)};
    dcp::load(folder.path("a"), state);
    check_sharded_parity(reference, empty, {.tolerance = kExact.tolerance, .gradients = false});
    expect_bit_equal(loss_of(empty, 1), loss_of(trained, 1));
  });
}

TEST_CASE("a copy of a unit of several dtypes has its shards", "[mixed]") {
  run_ranks(3, [](int) {
    nn::Linear reference(5, 7), sharded(5, 7);
    for (auto* linear : {&reference, &sharded}) {
      fill_parameters(**linear, 1);
      (*linear)->weight.set_data((*linear)->weight.to(at::kBFloat16));
      (*linear)->weight.set_requires_grad(false);
    }
    fully_shard(sharded);
    check_sharded_parity(*reference, *clone_sharded(*sharded), kExact);
  });
}

}  // namespace tessera::testing
