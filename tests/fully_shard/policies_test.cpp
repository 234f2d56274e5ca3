// Where shards are, in which dtypes and by which functions units communicate: offloading, overrides of single
// parameters, collectives of one's own, and patches.

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/adam.h>

#include "comm/collectives.h"
#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "testing/expect.h"
#include "testing/fsdp_models/patches.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "tests/fully_shard/models/train_and_compare.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

at::Tensor loss_in_float(Tower& tower, int batch) {
  return weighted_loss(tower(make_batch(static_cast<uint64_t>(batch), 3, 5)).to(at::kFloat));
}

/// Vectors compute in float32, matrices in bfloat16.
MixedPrecisionPolicy vectors_in_float() {
  return {.param_dtype = at::kBFloat16,
          .output_dtype = at::kFloat,
          .param_dtype_override_fn = [](const at::Tensor& param, const std::string& name) {
            return param.dim() == 1 && name.find("norm") != std::string::npos ? std::optional(at::kFloat)
                                                                              : std::nullopt;
          }};
}

}  // namespace

TEST_CASE("offloading to the CPU changes no number, and shards and gradients are there", "[offload]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  run_ranks(world_size, [&](int rank) {
    const FullyShardOptions options{.offload_policy = CPUOffloadPolicy{}};
    train_and_compare(rank, world_size, OptimizerBuilt::AfterSharding, options);
    Tower tower;
    shard_tower(tower,
                {.mp_policy = {.param_dtype = at::kBFloat16}, .offload_policy = CPUOffloadPolicy{.pin_memory = false}});
    loss_in_float(tower, rank).backward();
    for (const auto& param : tower->parameters()) {
      TESSERA_EXPECT(to_local(param.detach()).is_cpu() && to_local(param.grad()).is_cpu());
      TESSERA_EXPECT(param.grad().scalar_type() == at::kFloat);
    }
  });
}

TEST_CASE("ranks that offload differently are refused", "[offload]") {
  run_ranks(2, [](int rank) {
    Block block(4, 4);
    const auto policy = rank == 0 ? std::optional(CPUOffloadPolicy{}) : std::nullopt;
    expect_throws<ValueError>([&] { fully_shard(block, {.offload_policy = policy}); }, "offloaded to the CPU");
  });
}

TEST_CASE("parameters of one unit in several dtypes: one all-gather, equal to one process", "[override]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const auto [dim, hidden] = GENERATE(std::pair<int64_t, int64_t>{17, 13}, std::pair<int64_t, int64_t>{3, 2});
  const auto reshard = GENERATE(ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2));
  if (reshard.group_size() && world_size % 2 != 0) {
    return;
  }
  CAPTURE(world_size, dim, hidden, reshard.to_string());
  run_ranks(world_size, [&, dim = dim, hidden = hidden](int rank) {
    Tower reference(dim, hidden, 1), tower(dim, hidden, 1);
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    fully_shard(tower, {.reshard_after_forward = reshard, .mp_policy = vectors_in_float()});
    int gathers = 0;
    const auto patch = patch_all_gather([&](const AllGatherFn& original, const at::Tensor& output,
                                            const at::Tensor& input, const ProcessGroupPtr& group) {
      ++gathers;
      const int64_t ranks = gathers == 2 && reshard.group_size() ? 2 : world_size;
      TESSERA_EXPECT(output.scalar_type() == at::kByte && output.numel() == ranks * input.numel());
      return original(output, input, group);
    });
    auto loss = loss_in_float(tower, rank);
    expect_equal(fsdp(tower).unit_state() == ShardedState::ShardedPostForward, reshard.group_size() && world_size == 4);
    loss.backward();
    expect_equal(gathers, world_size == 1 ? 0 : reshard.is_on() ? 2 : 1);

    for (auto& item : reference->named_parameters()) {
      const bool stays = item.key().starts_with("norm");
      item.value().set_data(stays ? item.value().data() : item.value().to(at::kBFloat16));
    }
    std::vector<at::Tensor> sums;
    for (int r = 0; r < world_size; ++r) {
      reference->zero_grad();
      const auto batch = make_batch(static_cast<uint64_t>(r), 3, 5).to(at::kBFloat16);
      const auto expected = weighted_loss(reference(batch).to(at::kFloat));
      expected.backward();
      if (r == rank) {
        expect_bit_equal(loss.detach(), expected.detach());
      }
      size_t i = 0;
      for (const auto& param : reference->parameters()) {
        const auto grad = param.grad().to(at::kFloat);
        r == 0 ? sums.push_back(grad.clone()) : static_cast<void>(sums[i].add_(grad));
        ++i;
      }
    }
    size_t i = 0;
    for (const auto& param : tower->parameters()) {
      expect_bit_equal(full_tensor(param.grad()), sums[i++] / world_size);
    }
    fsdp(tower).unshard();
    TESSERA_EXPECT(tower->norm->weight.scalar_type() == at::kFloat);
    TESSERA_EXPECT(tower->in->weight.scalar_type() == at::kBFloat16);
    fsdp(tower).reshard();
  });
}

TEST_CASE("ranks agree on the dtypes of single parameters", "[override]") {
  run_ranks(4, [](int rank) {
    Tower tower;
    const MixedPrecisionPolicy policy{.param_dtype_override_fn = [&](const at::Tensor&, const std::string& name) {
      return rank == 3 && name == "in.bias" ? std::optional(at::kDouble) : std::nullopt;
    }};
    expect_throws<ValueError>([&] { fully_shard(tower, {.mp_policy = policy}); }, "'in.bias'");
  });
}

TEST_CASE("replicated parameters in several dtypes equal sharded ones", "[override]") {
  run_ranks(2, [](int rank) {
    Tower sharded, replicated;
    fill_parameters(*sharded, 1);
    fill_parameters(*replicated, 1);
    fully_shard(sharded, {.mp_policy = vectors_in_float()});
    replicate(replicated, {.mp_policy = vectors_in_float(), .offload_policy = CPUOffloadPolicy{}});
    loss_in_float(sharded, rank).backward();
    loss_in_float(replicated, rank).backward();
    const auto expected = sharded->named_parameters();
    for (const auto& item : replicated->named_parameters()) {
      expect_bit_equal(full_tensor(item.value().grad()), full_tensor(expected[item.key()].grad()));
    }
  });
}

TEST_CASE("collectives of one's own carry a unit's data", "[custom_collectives]") {
  const int world_size = GENERATE(2, 3, 4);
  run_ranks(world_size, [&](int rank) {
    int gathers = 0, scatters = 0;
    // By an all-to-all of copies, and an all-reduce of everything.
    const AllGatherFn all_gather = [&](const at::Tensor& output, const at::Tensor& input,
                                       const ProcessGroupPtr& group) {
      ++gathers;
      all_to_all(output, input.unsqueeze(0).expand({world_size, input.numel()}).contiguous().view(-1), {}, {}, group);
      return Pending();
    };
    const ReduceScatterFn reduce_scatter = [&](const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                               const ProcessGroupPtr& group) {
      ++scatters;
      const auto sum = input.clone();
      all_reduce(sum, op, group);
      output.copy_(sum.narrow(0, rank * output.numel(), output.numel()));
      return Pending();
    };
    train_and_compare(
        rank, world_size, OptimizerBuilt::AfterSharding,
        [&](Tower& tower) {
          shard_tower(tower);
          fsdp(tower->blocks[1]).set_custom_all_gather(all_gather);
          fsdp(tower->blocks[1]).set_custom_reduce_scatter(reduce_scatter);
        },
        world_size);
    expect_equal(gathers, 2 * kSteps);
    expect_equal(scatters, kSteps);
  });
}

TEST_CASE("an all-reduce of one's own sums the replicas", "[custom_collectives]") {
  run_ranks(4, [](int rank) {
    int calls = 0;
    train_and_compare(
        rank, 4, OptimizerBuilt::AfterSharding,
        [&](Tower& tower) {
          shard_tower(tower, {.mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "dp"})});
          fsdp(tower).set_custom_all_reduce([&](const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group) {
            ++calls;
            return all_reduce_async(tensor, op, group);
          });
        },
        2);
    expect_equal(calls, kSteps);
  });
}

TEST_CASE("patches see every collective with its tensors, nest, and end", "[patches]") {
  run_ranks(2, [](int rank) {
    Tower tower;
    shard_tower(tower, {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    int outer = 0, inner = 0, scatters = 0;
    const auto count = [](int& counter) {
      return [&counter](const AllGatherFn& original, const at::Tensor& output, const at::Tensor& input,
                        const ProcessGroupPtr& group) {
        ++counter;
        TESSERA_EXPECT(output.scalar_type() == at::kBFloat16 && output.numel() == 2 * input.numel());
        return original(output, input, group);
      };
    };
    {
      const auto first = patch_all_gather(count(outer));
      {
        const auto second = patch_all_gather(count(inner));
        const auto third = patch_reduce_scatter(std::bind_front(reduce_scatter_with_assert, [&](const at::Tensor& out) {
          ++scatters;
          TESSERA_EXPECT(out.scalar_type() == at::kFloat);
        }));
        loss_in_float(tower, rank).backward();
      }
      expect_equal(std::tuple(outer, inner, scatters), std::tuple(7, 7, 4));
      tower->zero_grad();
      loss_in_float(tower, rank).backward();
    }
    expect_equal(std::tuple(outer, inner, scatters), std::tuple(14, 7, 4));
    loss_in_float(tower, rank).backward();
    expect_equal(outer, 14);
  });
}

TEST_CASE("patches of a unit's steps see them in order, and a step that is left out stays undone", "[patches]") {
  run_ranks(2, [](int rank) {
    Tower tower;
    shard_tower(tower);
    loss_in_float(tower, rank).backward();
    std::vector<std::string> steps;
    const auto record = [&](const char* name) {
      return [&steps, name](const UnitCall& call) {
        steps.push_back(fmt::format("{} {}", name, call.unit));
        call.run();
      };
    };
    {
      const auto unshards = patch_unshard(record("unshard"));
      const auto reshards = patch_reshard(record("reshard"));
      const auto ends = patch_post_backward(record("post_backward"));
      loss_in_float(tower, rank).backward();
    }
    expect_equal(steps,
                 std::vector<std::string>{"unshard root", "unshard block0", "unshard block1", "reshard block0",
                                          "unshard block2", "reshard block1", "reshard block2", "unshard block2",
                                          "unshard block1", "post_backward block2", "reshard block2", "unshard block0",
                                          "post_backward block1", "reshard block1", "post_backward block0",
                                          "reshard block0", "post_backward root", "reshard root"});
    const auto left_out = patch_unshard([](const UnitCall&) {});
    expect_throws<StateError>([&] { loss_in_float(tower, rank); }, "is sharded");
  });
}

TEST_CASE("a patch that ends by an exception neither waits nor throws", "[patches]") {
  run_ranks(2, [](int rank) {
    const auto fail = [&] {
      const auto patch = patch_reshard([](const UnitCall& call) { call.run(); });
      TESSERA_CHECK(ValueError, rank != 0, "rank 0 fails");
      throw ValueError("rank 1 fails");
    };
    expect_throws<ValueError>(fail, "fails");
    Tower tower;
    shard_tower(tower);
    loss_in_float(tower, rank).backward();
  });
}

}  // namespace tessera::testing
