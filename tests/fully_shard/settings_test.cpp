// What FSDPModule's settings do to gradients, parameters and communication.

#include <ATen/TensorOperators.h>
#include <torch/optim/sgd.h>

#include "comm/collectives.h"
#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

at::Tensor micro_loss(Tower& tower, int rank, int micro = 0) {
  return weighted_loss(tower(make_batch(static_cast<uint64_t>(100 * micro + rank), 3, 5)));
}

constexpr int kMicros = 3;

void backward_of_all_micros(Tower& tower, int rank) {
  for (int micro = 0; micro < kMicros; ++micro) {
    micro_loss(tower, rank, micro).backward();
  }
}

}  // namespace

TEST_CASE("without gradient sync nothing is reduced until the last micro-batch, whose sum is exact") {
  const int world_size = GENERATE(1, 2, 3);
  run_ranks(world_size, [&](int rank) {
    auto pair = make_tower_pair();
    auto& tower = pair.sharded;
    for (int step = 0; step < 2; ++step) {
      tower->zero_grad();
      for (int micro = 0; micro < kMicros; ++micro) {
        const bool is_last = micro == kMicros - 1;
        fsdp(tower).set_requires_gradient_sync(is_last);
        reset_comm_stats();
        micro_loss(tower, rank, micro).backward();
        expect_equal(comm_stats()[Collective::ReduceScatter].calls, is_last && world_size > 1 ? 4 : 0);
        if (!is_last) {
          TESSERA_EXPECT(!tower->in->weight.grad().defined());
          expect_throws<StateError>([&] { fsdp(tower).check_ready_for_step(); }, "await their reduction");
        }
      }
      average_reference(*pair.reference, world_size, [&](int r) { backward_of_all_micros(pair.reference, r); });
      check_sharded_parity(pair.reference, tower, kExact);
      fsdp(tower).check_ready_for_step();
    }
  });
}

TEST_CASE("gradient sync can be off for a part of the model only") {
  run_ranks(2, [](int rank) {
    auto pair = make_tower_pair();
    fsdp(pair.sharded->blocks[1]).set_requires_gradient_sync(false);
    micro_loss(pair.sharded, rank).backward();
    TESSERA_EXPECT(!pair.sharded->blocks[1]->up->weight.grad().defined());
    average_reference(*pair.reference, 2, [&](int r) { micro_loss(pair.reference, r).backward(); });
    expect_bit_equal(full_tensor(pair.sharded->blocks[0]->up->weight.grad()),
                     pair.reference->blocks[0]->up->weight.grad());
    fsdp(pair.sharded).set_requires_gradient_sync(true);
    // The unit is not part of this backward; its gradients are reduced at the end all the same.
    auto x = make_batch(static_cast<uint64_t>(rank), 3, 17).requires_grad_();
    pair.sharded->blocks[2](x).sum().backward();
    expect_bit_equal(full_tensor(pair.sharded->blocks[1]->up->weight.grad()),
                     pair.reference->blocks[1]->up->weight.grad());
  });
}

TEST_CASE("with replicas the all-reduce can wait for the last micro-batch") {
  run_ranks(4, [](int rank) {
    auto pair = make_tower_pair({.mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"})});
    auto& tower = pair.sharded;
    for (int micro = 0; micro < kMicros; ++micro) {
      const bool is_last = micro == kMicros - 1;
      fsdp(tower).set_requires_all_reduce(is_last);
      reset_comm_stats();
      micro_loss(tower, rank, micro).backward();
      expect_equal(comm_stats()[Collective::ReduceScatter].calls, 4);
      expect_equal(comm_stats()[Collective::AllReduce].calls, is_last ? 4 : 0);
      TESSERA_EXPECT(tower->in->weight.grad().defined() == is_last);
    }
    average_reference(*pair.reference, 4, [&](int r) { backward_of_all_micros(pair.reference, r); });
    check_sharded_parity(pair.reference, tower, {.tolerance = {.rtol = 1e-4, .atol = 1e-6}});
  });
}

TEST_CASE("reductions are waited for in the last backward only") {
  run_ranks(2, [](int rank) {
    auto pair = make_tower_pair();
    auto& tower = pair.sharded;
    fsdp(tower).set_is_last_backward(false);
    micro_loss(tower, rank, 0).backward();
    TESSERA_EXPECT(!tower->in->weight.grad().defined());
    expect_throws<StateError>([&] { fsdp(tower).check_ready_for_step(); }, "set_is_last_backward(true)");
    fsdp(tower).set_is_last_backward(true);
    average_reference(*pair.reference, 2, [&](int r) { micro_loss(pair.reference, r, 0).backward(); });
    const auto first = pair.reference->in->weight.grad();
    micro_loss(tower, rank, 1).backward();
    average_reference(*pair.reference, 2, [&](int r) { micro_loss(pair.reference, r, 1).backward(); });
    expect_bit_equal(full_tensor(tower->in->weight.grad()), first + pair.reference->in->weight.grad());
    fsdp(tower).check_ready_for_step();
  });
}

TEST_CASE("gradients are divided by what was set, after sums alone") {
  const bool force_sum = GENERATE(true, false);
  const double factor = GENERATE(2.5, 3.0, 1.0);
  run_ranks(3, [&](int rank) {
    auto pair = make_tower_pair();
    for (auto* module : {&pair.sharded->blocks[0], &pair.sharded->blocks[1]}) {
      fsdp(*module).set_gradient_divide_factor(factor);
      fsdp(*module).set_force_sum_reduction_for_comms(force_sum);
    }
    micro_loss(pair.sharded, rank).backward();
    at::Tensor sum;
    for (int r = 0; r < 3; ++r) {
      pair.reference->zero_grad();
      micro_loss(pair.reference, r).backward();
      const auto grad = pair.reference->blocks[1]->up->weight.grad();
      sum = sum.defined() ? sum + grad : grad;
    }
    expect_bit_equal(full_tensor(pair.sharded->blocks[1]->up->weight.grad()), sum / factor);
    expect_throws<ValueError>([&] { fsdp(pair.sharded).set_gradient_divide_factor(0); }, "positive");
  });
}

TEST_CASE("sums alone give the average too") {
  run_ranks(3, [](int rank) {
    auto pair = make_tower_pair();
    for (auto& block : pair.sharded->blocks) {
      fsdp(block).set_force_sum_reduction_for_comms(true);
    }
    fsdp(pair.sharded).set_force_sum_reduction_for_comms(true);
    micro_loss(pair.sharded, rank).backward();
    average_reference(*pair.reference, 3, [&](int r) { micro_loss(pair.reference, r).backward(); });
    check_sharded_parity(pair.reference, pair.sharded, kExact);
  });
}

TEST_CASE("parameters that stay unsharded after backward need no gather, and no optimizer may step on them") {
  run_ranks(2, [](int rank) {
    auto pair = make_tower_pair();
    auto& tower = pair.sharded;
    torch::optim::SGD optimizer(tower->parameters(), torch::optim::SGDOptions(0.1));
    fsdp(tower).set_reshard_after_forward(false);
    fsdp(tower).set_reshard_after_backward(false);
    micro_loss(tower, rank, 0).backward();
    TESSERA_EXPECT(!is_dtensor(tower->in->weight));
    TESSERA_EXPECT(is_dtensor(tower->in->weight.grad()));
    reset_comm_stats();
    micro_loss(tower, rank, 1).backward();
    micro_loss(tower, rank, 2).backward();
    expect_equal(comm_stats()[Collective::AllGather].calls, 0);
    expect_throws<StateError>([&] { fsdp(tower).check_ready_for_step(); }, "are unsharded");
    expect_throws<StateError>([&] { optimizer.step(); }, "'in.weight.grad' is sharded");
    fsdp(tower).reshard();
    for (auto& block : tower->blocks) {
      fsdp(block).reshard();
    }
    fsdp(tower).check_ready_for_step();
    optimizer.step();
    at::Tensor sum;
    for (int micro = 0; micro < kMicros; ++micro) {
      average_reference(*pair.reference, 2, [&](int r) { micro_loss(pair.reference, r, micro).backward(); });
      const auto grad = pair.reference->in->weight.grad();
      sum = sum.defined() ? sum + grad : grad;
    }
    expect_bit_equal(full_tensor(tower->in->weight.grad()), sum);
  });
}

TEST_CASE("set_reshard_after_forward(false) lets an evaluation gather once, and training goes on after it") {
  const int world_size = GENERATE(2, 3);
  run_ranks(world_size, [&](int rank) {
    auto pair = make_tower_pair();
    auto& tower = pair.sharded;
    const auto evaluate = [&](int batches) {
      const at::NoGradGuard no_grad;
      for (int batch = 0; batch < batches; ++batch) {  // another number of them on each rank
        const auto x = make_batch(static_cast<uint64_t>(batch), 3, 5);
        expect_close(tower(x), pair.reference(x));
      }
    };
    const auto gathers = [] { return comm_stats()[Collective::AllGather].calls; };
    const auto train = [&] {
      tower->zero_grad();
      average_reference(*pair.reference, world_size, [&](int r) { micro_loss(pair.reference, r).backward(); });
      micro_loss(tower, rank).backward();
      check_sharded_parity(pair.reference, tower, kExact);
    };
    evaluate(1);
    TESSERA_EXPECT(is_dtensor(tower->in->weight));
    fsdp(tower).set_reshard_after_forward(false);
    evaluate(1);
    reset_comm_stats();
    evaluate(2 + rank);
    expect_equal(gathers(), 0);
    train();  // with what is there; its backward shards all
    for (const auto& param : tower->parameters()) {
      TESSERA_EXPECT(is_dtensor(param));
    }
    evaluate(1);
    fsdp(tower).set_reshard_after_forward(true);
    reshard_all(tower);
    for (auto* model : {&pair.reference, &tower}) {
      const at::NoGradGuard no_grad;
      (*model)->out->bias.add_(1);
    }
    evaluate(1);
    TESSERA_EXPECT(is_dtensor(tower->in->weight));
    train();
  });
}

TEST_CASE("an embedding needs no gather in backward") {
  run_ranks(3, [](int rank) {
    tessera::nn::Embedding plain(11, 4), sharded(11, 4);
    fill_parameters(*plain, 1);
    fill_parameters(*sharded, 1);
    fully_shard(sharded);
    fsdp(sharded).set_unshard_in_backward(false);
    fsdp(sharded).set_reshard_after_forward(true);
    const auto loss_of = [](tessera::nn::Embedding& embedding, int r) {
      return weighted_loss(embedding(at::tensor({r, 3 + r, 10, r})));
    };
    for (int step = 0; step < 2; ++step) {
      auto loss = loss_of(sharded, rank);
      reset_comm_stats();
      loss.backward();
      expect_equal(comm_stats()[Collective::AllGather].calls, 0);
      expect_equal(comm_stats()[Collective::ReduceScatter].calls, 1);
      average_reference(*plain, 3, [&](int r) { loss_of(plain, r).backward(); });
      check_sharded_parity(plain, sharded, kExact);
      sharded->zero_grad();
    }
  });
}

TEST_CASE("an asynchronous unshard is finished by its handle or by forward") {
  run_ranks(2, [](int) {
    auto pair = make_tower_pair();
    auto& block = pair.sharded->blocks[0];
    auto handle = fsdp(block).unshard(/*async_op=*/true);
    TESSERA_EXPECT(fsdp(block).unit_state() == ShardedState::Unsharding);
    handle.wait();
    handle.wait();
    TESSERA_EXPECT(fsdp(block).unit_state() == ShardedState::Unsharded);
    expect_bit_equal(block->up->weight.detach(), pair.reference->blocks[0]->up->weight.detach());
    fsdp(block).reshard();
    handle = fsdp(block).unshard(/*async_op=*/true);
    block(make_batch(1, 3, 17)).sum().backward();
    handle.wait();
    TESSERA_EXPECT(fsdp(block).unit_state() == ShardedState::Sharded);
    fsdp(block).unshard(/*async_op=*/true);
    fsdp(block).reshard();
    TESSERA_EXPECT(fsdp(block).unit_state() == ShardedState::Sharded);
  });
}

TEST_CASE("asynchronous unshards before the first forward are finished by it") {
  const int world_size = GENERATE(2, 3);
  run_ranks(world_size, [&](int rank) {
    for (int i = 0; i < 10; ++i) {
      auto pair = make_tower_pair();
      auto& tower = pair.sharded;
      fsdp(tower->blocks[1]).unshard(/*async_op=*/true);
      auto handle = fsdp(tower).unshard(/*async_op=*/true);
      micro_loss(tower, rank).backward();
      handle.wait();
      average_reference(*pair.reference, world_size, [&](int r) { micro_loss(pair.reference, r).backward(); });
      check_sharded_parity(pair.reference, tower, kExact);
    }
  });
}

TEST_CASE("reset_iter_state forgets an iteration, its unsynchronized gradients too") {
  run_ranks(2, [](int rank) {
    auto pair = make_tower_pair();
    auto& tower = pair.sharded;
    fsdp(tower).set_requires_gradient_sync(false);
    micro_loss(tower, rank, 0).backward();
    auto loss = micro_loss(tower, rank, 1);
    expect_throws<StateError>([&] { fsdp(tower->blocks[0]).reset_iter_state(); }, "'block0' of a larger model");
    fsdp(tower).reset_iter_state();
    TESSERA_EXPECT(!is_dtensor(tower->in->weight) == false);
    fsdp(tower).set_requires_gradient_sync(true);
    micro_loss(tower, rank, 2).backward();
    average_reference(*pair.reference, 2, [&](int r) { micro_loss(pair.reference, r, 2).backward(); });
    check_sharded_parity(pair.reference, tower, kExact);
  });
}

TEST_CASE("a hook of one's own reduces over an axis that the unit's mesh does not have") {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"outer", "dp"});
    auto pair = make_tower_pair({.mesh = mesh["dp"]});
    auto& tower = pair.sharded;
    int calls = 0;
    const auto average_over_outer = [&](const at::Tensor& flat) {
      ++calls;
      all_reduce(flat, ReduceOp::Avg, mesh.group("outer"));
    };
    fsdp(tower).set_all_reduce_hook(average_over_outer);
    for (auto& block : tower->blocks) {
      fsdp(block).set_all_reduce_hook(average_over_outer);
    }
    micro_loss(tower, rank).backward();
    expect_equal(calls, 4);
    average_reference(
        *pair.reference, 4, [&](int r) { micro_loss(pair.reference, r).backward(); }, /*shard_ranks=*/2);
    check_sharded_parity(pair.reference, tower, kExact);
  });
}

}  // namespace tessera::testing
