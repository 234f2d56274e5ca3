// FullyShardOptions: which parameters, which modules, which precision, which ranks.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("ignored parameters stay as they are") {
  run_ranks(2, [](int rank) {
    Tower reference, tower;
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    const auto& ignored = tower->blocks[1]->up->weight;
    const FullyShardOptions options{.ignored_params = {ignored, tower->norm->weight}};
    shard_tower(tower, options);
    TESSERA_EXPECT(!is_dtensor(ignored));
    TESSERA_EXPECT(!is_dtensor(tower->norm->weight));
    TESSERA_EXPECT(is_dtensor(tower->norm->bias));
    expect_equal(fsdp(tower->blocks[1]).num_parameters(), 3u);
    expect_equal(fsdp(tower).num_parameters(), 5u);
    loss_of(tower, rank).backward();
    loss_of(reference, rank).backward();
    expect_bit_equal(ignored.grad(), reference->blocks[1]->up->weight.grad());
    average_reference(*reference, 2, [&](int r) { loss_of(reference, r).backward(); });
    expect_bit_equal(full_tensor(tower->blocks[1]->down->weight.grad()), reference->blocks[1]->down->weight.grad());
  });
}

TEST_CASE("a parameter that an inner unit ignores belongs to no unit around it") {
  run_ranks(2, [](int) {
    Tower tower;
    const auto num_parameters = tower->parameters().size();
    fully_shard(tower->blocks[0], {.ignored_params = {tower->blocks[0]->up->weight}});
    fully_shard(tower);
    expect_equal(fsdp(tower->blocks[0]).num_parameters() + fsdp(tower).num_parameters(), num_parameters - 1);
    Block alone(4, 4);
    fully_shard(alone, {.ignored_params = alone->parameters()});
    expect_equal(fsdp(alone).num_parameters(), 0u);
    TESSERA_EXPECT(alone(make_batch(1, 3, 4)).defined());
    TESSERA_EXPECT(!is_dtensor(tower->blocks[0]->up->weight));
  });
}

TEST_CASE("modules that are one unit equal one process, called in any order and several times") {
  const int world_size = GENERATE(1, 2, 3);
  run_ranks(world_size, [&](int rank) {
    Tower reference, tower;
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    fully_shard({&*tower->blocks[0], &*tower->blocks[2], &*tower->out});
    fully_shard(tower);
    TESSERA_EXPECT(fsdp(tower->blocks[0]).num_parameters() == 10);
    expect_equal(fsdp(tower->blocks[2]).num_parameters(), fsdp(*tower->out).num_parameters());
    for (int step = 0; step < 2; ++step) {
      tower->zero_grad();
      loss_of(tower, rank).backward();
      average_reference(*reference, world_size, [&](int r) { loss_of(reference, r).backward(); });
      check_sharded_parity(reference, tower, kExact);
    }
    // Only one of the unit's modules runs: the outermost forward's end frees the parameters.
    {
      const at::NoGradGuard no_grad;
      tower->blocks.pop_back();
      tower(make_batch(1, 3, 5));
    }
    expect_equal(fsdp(tower->blocks[0]).unsharded_bytes(), 0u);
  });
}

TEST_CASE("a share among fewer ranks is gathered among them in backward") {
  run_ranks(4, [](int rank) {
    Tower tower;
    shard_tower(tower, {.reshard_after_forward = 2});
    auto& block = tower->blocks[1];
    const int64_t numel = 17 * 13 + 13 + 13 * 17 + 17;
    auto loss = loss_of(tower, rank);
    TESSERA_EXPECT(fsdp(block).unit_state() == ShardedState::ShardedPostForward);
    TESSERA_EXPECT(is_dtensor(block->up->weight));
    reset_comm_stats();
    loss.backward();
    TESSERA_EXPECT(fsdp(block).unit_state() == ShardedState::Sharded);
    const auto gathers = comm_stats()[Collective::AllGather];
    expect_equal(gathers.calls, 4);
    // Half of each block, uneven cuts padded, goes to one peer; over all ranks it would be a quarter to three peers.
    TESSERA_EXPECT(gathers.bytes_sent > 3 * numel / 2 * 4 && gathers.bytes_sent < 4 * (numel / 2 + 120) * 4);
    fsdp(block).unshard();
    expect_equal(fsdp(block).unsharded_bytes(), static_cast<size_t>(numel) * 4);
    fsdp(block).reshard();
    fsdp(tower).set_reshard_after_forward(true);
    loss = loss_of(tower, rank);
    TESSERA_EXPECT(fsdp(block).unit_state() == ShardedState::Sharded);
  });
}

TEST_CASE("a share that no backward took is forgotten: what comes after a step computes with what was stepped") {
  run_ranks(4, [](int rank) {
    Tower reference, tower;
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    shard_tower(tower, {.reshard_after_forward = 2});
    torch::optim::SGD reference_optimizer(reference->parameters(), 0.1), optimizer(tower->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      tower->zero_grad();
      loss_of(tower, rank).backward();
      average_reference(*reference, 4, [&](int r) { loss_of(reference, r).backward(); });
      check_sharded_parity(reference, tower, kExact);
      expect_bit_equal(loss_of(tower, rank).detach(), loss_of(reference, rank).detach());  // differentiable
      TESSERA_EXPECT(fsdp(tower->blocks[0]).unit_state() == ShardedState::ShardedPostForward);
      optimizer.step();
      reference_optimizer.step();
      fsdp(tower->blocks[0]).unshard();
      expect_bit_equal(tower->blocks[0]->up->weight.detach(), reference->blocks[0]->up->weight.detach());
      fsdp(tower->blocks[0]).reshard();
    }
    expect_bit_equal(loss_of(tower, rank).detach(), loss_of(reference, rank).detach());
  });
}

TEST_CASE("a model that one rank alone keeps does not stand in the way of the next one's shares") {
  run_ranks(4, [](int rank) {
    Tower kept = filled_tower();
    shard_tower(kept, {.reshard_after_forward = 2});
    if (rank != 0) {
      kept = nullptr;
    }
    Tower reference = filled_tower(), tower = filled_tower();
    shard_tower(tower, {.reshard_after_forward = 2});
    loss_of(tower, rank).backward();
    average_reference(*reference, 4, [&](int r) { loss_of(reference, r).backward(); });
    check_sharded_parity(reference, tower, kExact);
  });
}

TEST_CASE("a unit of which one module ran without gradients keeps no share of its parameters") {
  run_ranks(4, [](int rank) {
    Tower reference, tower;
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    fully_shard({&*tower->blocks[0], &*tower->blocks[1]}, {.reshard_after_forward = 2});
    fully_shard(tower);
    torch::optim::SGD reference_optimizer(reference->parameters(), 0.1), optimizer(tower->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      tower->zero_grad();
      loss_of(tower, rank).backward();
      average_reference(*reference, 4, [&](int r) { loss_of(reference, r).backward(); });
      check_sharded_parity(reference, tower, kExact);
      {
        const at::NoGradGuard no_grad;
        const auto x = make_batch(static_cast<uint64_t>(rank), 3, 17);
        expect_bit_equal(tower->blocks[1](x), reference->blocks[1](x));
      }
      TESSERA_EXPECT(fsdp(tower->blocks[0]).unit_state() == ShardedState::Sharded);
      optimizer.step();
      reference_optimizer.step();
    }
    expect_bit_equal(loss_of(tower, rank).detach(), loss_of(reference, rank).detach());
  });
}

TEST_CASE("reshard_after_forward takes divisors of the ranks only") {
  run_ranks(4, [](int) {
    Block block(4, 4);
    expect_throws<ValueError>([&] { fully_shard(block, {.reshard_after_forward = 3}); }, "divides the 4");
    expect_throws<ValueError>([&] { fully_shard(block, {.reshard_after_forward = 0}); }, "divides the 4");
    expect_throws<ValueError>([&] { fully_shard(block, {.reshard_after_forward = 8}); }, "divides the 4");
    fully_shard(block, {.reshard_after_forward = 1});
    block(make_batch(1, 3, 4).requires_grad_());
    const at::NoGradGuard no_grad;
    block(make_batch(1, 3, 4));
    expect_equal(fsdp(block).unsharded_bytes(), 0u);
  });
}

TEST_CASE("shard_placement_fn decides dim by dim; the local tensors are what distribute_tensor gives") {
  run_ranks(3, [](int) {
    Block reference(17, 13), block(17, 13);
    fill_parameters(*reference, 1);
    fill_parameters(*block, 1);
    fully_shard(block, {.shard_placement_fn = [](const at::Tensor& param) -> std::optional<Shard> {
                  return param.dim() == 2 && param.size(0) == 13 ? std::optional(Shard(-1)) : std::nullopt;
                }});
    expect_equal(placements(block->up->weight), Placements{Shard(1)});
    expect_equal(placements(block->down->weight), Placements{Shard(0)});
    const auto mesh = device_mesh(block->up->weight);
    expect_bit_equal(to_local(block->up->weight.detach()),
                     to_local(distribute_tensor(reference->up->weight.detach(), mesh, {Shard(1)})));
    Block other(17, 13);
    expect_throws<ValueError>(
        [&] { fully_shard(other, {.shard_placement_fn = [](const at::Tensor&) { return std::optional(Shard(1)); }}); },
        "Shard(1) for parameter 'up.bias', which has 1 dims");
  });
}

TEST_CASE("precision: what is gathered, computed, reduced and kept") {
  const auto param_dtype = GENERATE(at::kFloat, at::kBFloat16);
  const auto reduce_dtype = GENERATE(at::kFloat, at::kBFloat16, at::kDouble);
  const bool reshard = GENERATE(true, false);
  run_ranks(2, [&](int rank) {
    Tower reference, tower;
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    MixedPrecisionPolicy policy{.param_dtype = param_dtype, .reduce_dtype = reduce_dtype};
    for (auto& block : tower->blocks) {
      fully_shard(block, {.reshard_after_forward = reshard, .mp_policy = policy});
    }
    policy.output_dtype = at::kFloat;
    fully_shard(tower, {.reshard_after_forward = reshard, .mp_policy = policy});
    // The oracle: a copy of the model in the compute dtype, gradients summed and averaged in the reduce dtype.
    reference->to(param_dtype);
    at::Tensor sum;
    for (int r = 0; r < 2; ++r) {
      reference->zero_grad();
      weighted_loss(reference(make_batch(static_cast<uint64_t>(r), 3, 5).to(param_dtype)).to(at::kFloat)).backward();
      const auto grad = reference->in->weight.grad().to(reduce_dtype).to(at::kDouble);
      sum = sum.defined() ? sum + grad : grad;
    }
    fsdp(tower).unshard();
    TESSERA_EXPECT(tower->in->weight.scalar_type() == param_dtype);
    fsdp(tower).reshard();
    const auto out = tower(make_batch(static_cast<uint64_t>(rank), 3, 5));
    TESSERA_EXPECT(out.scalar_type() == at::kFloat);
    weighted_loss(out).backward();
    const auto grad = full_tensor(tower->in->weight.grad());
    TESSERA_EXPECT(grad.scalar_type() == at::kFloat);
    expect_bit_equal(grad, (sum / 2).to(reduce_dtype).to(at::kFloat));
  });
}

TEST_CASE("inputs are cast to the compute dtype unless the policy says no") {
  run_ranks(2, [](int) {
    for (const bool cast : {true, false}) {
      Block block(4, 4);
      fully_shard(block, {.mp_policy = {.param_dtype = at::kBFloat16, .cast_forward_inputs = cast}});
      if (cast) {
        TESSERA_EXPECT(block(make_batch(1, 3, 4)).scalar_type() == at::kBFloat16);
      } else {
        expect_throws<c10::Error>([&] { block(make_batch(1, 3, 4)); }, "dtype");
      }
    }
  });
}

TEST_CASE("memory: with prefetch at most two units are acquired at one time, and kept; buffers only where needed") {
  const bool has_buffers = GENERATE(false, true);
  run_ranks(2, [&](int rank) {
    constexpr int64_t kDim = 64, kHidden = 256;
    if (has_buffers) {
      // Functions of one's own get the flat buffers that the engine does without otherwise.
      comm_overrides()->all_gather = [](const auto&... arguments) { return all_gather_async(arguments...); };
      comm_overrides()->reduce_scatter = [](const auto&... arguments) { return reduce_scatter_async(arguments...); };
    }
    Tower tower(kDim, kHidden, 6);
    shard_tower(tower);
    const size_t unit = (2 * kDim * kHidden + kDim + kHidden) * sizeof(float);
    const auto run_step = [&] {
      tower->zero_grad();
      loss_of(tower, rank).backward();
    };
    run_step();
    fsdp(tower).reset_peak_memory();
    for (int step = 0; step < 3; ++step) {
      run_step();
    }
    const auto stats = fsdp(tower).memory_stats();
    expect_equal(stats.acquired, 0u);
    // In backward, while a unit computes: its parameters, those of the next, and the root's few. With buffers, while a
    // unit is copied out: its gather, its parameters, and the gradients of the unit before in flight.
    const size_t units = has_buffers ? 3 : 2;
    TESSERA_EXPECT(stats.peak_acquired >= units * unit && stats.peak_acquired <= units * unit + unit / 10);
    TESSERA_EXPECT(stats.held <= stats.peak_acquired + stats.peak_acquired / 4);
    const size_t before = stats.held;
    run_step();
    expect_equal(fsdp(tower).memory_stats().held, before);
  });
}

TEST_CASE("memory: sharded gradients are views of one buffer a unit, used again after zero_grad") {
  run_ranks(2, [](int rank) {
    Tower tower;
    shard_tower(tower);
    const auto& block = *tower->blocks[0];
    loss_of(tower, rank).backward();
    const auto* storage = to_local(block.up->weight.grad()).storage().unsafeGetStorageImpl();
    TESSERA_EXPECT(to_local(block.down->bias.grad()).storage().unsafeGetStorageImpl() == storage);
    tower->zero_grad();
    loss_of(tower, rank).backward();
    TESSERA_EXPECT(to_local(block.up->weight.grad()).storage().unsafeGetStorageImpl() == storage);
    // Somebody still holds a gradient: it keeps its values.
    const auto held = to_local(block.up->weight.grad());
    const auto values = held.clone();
    tower->zero_grad();
    weighted_loss(tower(make_batch(50 + static_cast<uint64_t>(rank), 3, 5))).backward();
    expect_bit_equal(held, values);
    TESSERA_EXPECT(to_local(block.up->weight.grad()).storage().unsafeGetStorageImpl() != storage);
  });
}

}  // namespace tessera::testing
