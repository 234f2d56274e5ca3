// When parameters are gathered, freed and reduced; unusual graphs; recovery after exceptions.

#include <ATen/TensorOperators.h>
#include <c10/core/InferenceMode.h>
#include <torch/optim/sgd.h>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// One backward through both models with `loss_of(model, rank)`, then bit-equal gradients.
template <class LossOf>
void expect_equal_backward(TowerPair& pair, int rank, int world_size, LossOf&& loss_of) {
  average_reference(*pair.reference, world_size, [&](int r) { loss_of(pair.reference, r).backward(); });
  loss_of(pair.sharded, rank).backward();
  check_sharded_parity(pair.reference, pair.sharded, kExact);
}

size_t unsharded_bytes(Tower& tower) {
  size_t bytes = fsdp(tower).unsharded_bytes();
  for (auto& block : tower->blocks) {
    bytes += fsdp(block).unsharded_bytes();
  }
  return bytes;
}

}  // namespace

TEST_CASE("unsharded parameters occupy no memory between forward and backward, nor after backward") {
  run_ranks(2, [](int rank) {
    auto pair = make_tower_pair({.reshard_after_forward = true});
    auto& tower = pair.sharded;
    TESSERA_EXPECT(is_dtensor(tower->in->weight));
    expect_equal(unsharded_bytes(tower), 0u);
    auto loss = weighted_loss(tower(make_batch(static_cast<uint64_t>(rank), 3, 5)));
    expect_equal(unsharded_bytes(tower), 0u);
    TESSERA_EXPECT(is_dtensor(tower->in->weight));
    loss.backward();
    expect_equal(unsharded_bytes(tower), 0u);
    TESSERA_EXPECT(is_dtensor(tower->blocks[0]->up->weight.grad()));
  });
}

TEST_CASE("the root keeps its parameters until backward is done, inner units do not") {
  run_ranks(2, [](int rank) {
    auto pair = make_tower_pair();
    auto& tower = pair.sharded;
    auto loss = weighted_loss(tower(make_batch(static_cast<uint64_t>(rank), 3, 5)));
    expect_equal(fsdp(tower).unsharded_bytes(), (17 * 5 + 17 + 17 + 17 + 3 * 17 + 3) * sizeof(float));
    expect_equal(fsdp(tower->blocks[1]).unsharded_bytes(), 0u);
    loss.backward();
    expect_equal(unsharded_bytes(tower), 0u);
  });
}

TEST_CASE("a forward in inference mode gives what one process gives, before and after training") {
  const bool reshards = GENERATE(true, false);
  run_ranks(2, [=](int rank) {
    auto pair = make_tower_pair({.reshard_after_forward = reshards});
    const auto infer = [&] {
      const c10::InferenceMode guard;
      const auto batch = make_batch(static_cast<uint64_t>(rank), 3, 5);
      expect_bit_equal(pair.sharded(batch), pair.reference(batch));
    };
    infer();
    for (int step = 0; step < 2; ++step) {
      expect_equal_backward(pair, rank, 2, [](Tower& tower, int r) {
        return weighted_loss(tower(make_batch(static_cast<uint64_t>(r), 3, 5)));
      });
      for (auto* tower : {&pair.reference, &pair.sharded}) {
        torch::optim::SGD((*tower)->parameters(), 0.1).step();
        (*tower)->zero_grad();
      }
      infer();
    }
  });
}

TEST_CASE("a model that is sharded in inference mode may be trained outside of it") {
  run_ranks(2, [](int rank) {
    TowerPair pair;
    fill_parameters(*pair.reference, 1);
    fill_parameters(*pair.sharded, 1);
    {
      const c10::InferenceMode guard;
      shard_tower(pair.sharded);
      const auto batch = make_batch(static_cast<uint64_t>(rank), 3, 5);
      expect_bit_equal(pair.sharded(batch), pair.reference(batch));
    }
    expect_equal_backward(pair, rank, 2, [](Tower& tower, int r) {
      return weighted_loss(tower(make_batch(static_cast<uint64_t>(r), 3, 5)));
    });
  });
}

TEST_CASE("a forward without gradients frees the root's parameters too") {
  run_ranks(2, [](int) {
    auto pair = make_tower_pair();
    const at::NoGradGuard no_grad;
    pair.sharded(make_batch(1, 3, 5));
    expect_equal(unsharded_bytes(pair.sharded), 0u);
  });
}

TEST_CASE("a step costs two all-gathers and one reduce-scatter a unit, one all-gather less for the root") {
  run_ranks(2, [](int rank) {
    auto pair = make_tower_pair();
    reset_comm_stats();
    weighted_loss(pair.sharded(make_batch(static_cast<uint64_t>(rank), 3, 5))).backward();
    const auto stats = comm_stats();
    expect_equal(stats[Collective::AllGather].calls, 3 * 2 + 1);
    expect_equal(stats[Collective::ReduceScatter].calls, 4);
  });
}

TEST_CASE("parameters keep their identity") {
  run_ranks(2, [](int) {
    Tower tower;
    auto* before = tower->in->weight.unsafeGetTensorImpl();
    shard_tower(tower);
    TESSERA_EXPECT(tower->in->weight.unsafeGetTensorImpl() == before);
    TESSERA_EXPECT(tower->parameters()[0].unsafeGetTensorImpl() == before);
    weighted_loss(tower(make_batch(1, 3, 5))).backward();
    TESSERA_EXPECT(tower->in->weight.unsafeGetTensorImpl() == before);
  });
}

TEST_CASE("gradients accumulate over several backwards") {
  const int world_size = GENERATE(1, 3);
  run_ranks(world_size, [&](int rank) {
    auto pair = make_tower_pair();
    for (uint64_t micro = 0; micro < 3; ++micro) {
      average_reference(*pair.reference, world_size, [&](int r) {
        weighted_loss(pair.reference(make_batch(10 * micro + static_cast<uint64_t>(r), 3, 5))).backward();
      });
      auto before = pair.sharded->in->weight.grad().defined() ? full_tensor(pair.sharded->in->weight.grad()).clone()
                                                              : at::zeros_like(pair.reference->in->weight);
      weighted_loss(pair.sharded(make_batch(10 * micro + static_cast<uint64_t>(rank), 3, 5))).backward();
      expect_bit_equal(full_tensor(pair.sharded->in->weight.grad()), before + pair.reference->in->weight.grad());
    }
  });
}

TEST_CASE("a unit may be called several times in one forward") {
  const int world_size = GENERATE(1, 2, 3);
  const bool parallel = GENERATE(true, false);
  run_ranks(world_size, [&](int rank) {
    auto pair = make_tower_pair();
    // The outer layers are left out, so call the blocks through the root's forward hooks as well.
    expect_equal_backward(pair, rank, world_size, [&](Tower& tower, int r) {
      const auto x = make_batch(static_cast<uint64_t>(r), 3, 17);
      auto& block = tower->blocks[0];
      auto first = block(x.clone().requires_grad_());
      return weighted_loss(parallel ? first + block(x * 2) : block(block(first)));
    });
  });
}

TEST_CASE("in-place changes of a unit's output, also through a view, keep its backward") {
  run_ranks(2, [](int rank) {
    auto pair = make_tower_pair();
    expect_equal_backward(pair, rank, 2, [&](Tower& tower, int r) {
      auto x = tower->blocks[0](make_batch(static_cast<uint64_t>(r), 3, 17));
      x.mul_(2);
      x.view({-1}).add_(1);
      return weighted_loss(tower->blocks[1](x));
    });
  });
}

TEST_CASE("a frozen layer before a trainable one in the same unit still passes the gradient on") {
  run_ranks(2, [](int rank) {
    auto pair = make_tower_pair();
    for (auto* tower : {&pair.reference, &pair.sharded}) {
      (*tower)->blocks[1]->up->weight.set_requires_grad(false);
      (*tower)->blocks[1]->up->bias.set_requires_grad(false);
      (*tower)->blocks[2]->down->weight.set_requires_grad(false);
    }
    expect_equal_backward(pair, rank, 2, [&](Tower& tower, int r) {
      return weighted_loss(tower(make_batch(static_cast<uint64_t>(r), 3, 5)));
    });
    TESSERA_EXPECT(!pair.sharded->blocks[1]->up->weight.grad().defined());
  });
}

TEST_CASE("parameters that no rank used have no gradient; those that one rank used have the average") {
  run_ranks(3, [](int rank) {
    auto pair = make_tower_pair();
    const auto loss_of = [&](Tower& tower, int r) {
      auto x = make_batch(static_cast<uint64_t>(r), 3, 5);
      auto out = tower(x);
      return r == 1 ? weighted_loss(out) : out.sum() * 0 + 1;
    };
    expect_equal_backward(pair, rank, 3, loss_of);
  });
}

TEST_CASE("an exception in forward leaves the model usable") {
  run_ranks(2, [](int rank) {
    auto pair = make_tower_pair();
    expect_throws<c10::Error>([&] { pair.sharded(make_batch(1, 3, 4)); }, "shapes cannot be multiplied (3x4 and 5x17)");
    expect_equal(unsharded_bytes(pair.sharded), 0u);
    expect_equal_backward(pair, rank, 2, [&](Tower& tower, int r) {
      return weighted_loss(tower(make_batch(static_cast<uint64_t>(r), 3, 5)));
    });
  });
}

TEST_CASE("an exception in backward leaves the model usable and keeps earlier gradients") {
  run_ranks(2, [](int rank) {
    auto pair = make_tower_pair();
    auto& tower = pair.sharded;
    const auto loss_of = [&](Tower& model, int r) {
      return weighted_loss(model(make_batch(static_cast<uint64_t>(r), 3, 5)));
    };
    expect_equal_backward(pair, rank, 2, loss_of);

    bool fail = true;
    auto handle = hook_point(*tower->blocks[1], "test").register_forward_hook([&](HookPoint&, TensorRefs outputs) {
      if (!outputs[0]->requires_grad()) {
        return;
      }
      outputs[0]->register_hook([&fail](const at::Tensor& grad) {
        TESSERA_CHECK(Error, !fail, "on purpose");
        return grad;
      });
    });
    auto loss = loss_of(tower, rank);
    expect_throws<Error>([&] { loss.backward(); }, "on purpose");
    fail = false;
    {
      const at::NoGradGuard no_grad;  // the next forward recovers; only block2 was complete
      tower(make_batch(1, 3, 5));
    }
    expect_equal(unsharded_bytes(tower), 0u);
    expect_bit_equal(full_tensor(tower->out->weight.grad()), pair.reference->out->weight.grad());
    expect_bit_equal(full_tensor(tower->blocks[1]->up->weight.grad()), pair.reference->blocks[1]->up->weight.grad());

    for (auto* model : {&pair.reference, &pair.sharded}) {
      (*model)->zero_grad();
    }
    expect_equal_backward(pair, rank, 2, loss_of);
  });
}

TEST_CASE("a backward that failed hides no gradient from zero_grad(), and leaves nothing to the next") {
  const bool has_forward_between = GENERATE(true, false);
  run_ranks(2, [&](int rank) {
    auto pair = make_tower_pair();
    auto& tower = pair.sharded;
    const auto loss_of = [](Tower& model, int r, uint64_t step) {
      return weighted_loss(model(make_batch(10 * step + static_cast<uint64_t>(r), 3, 5)));
    };
    bool fail = false;
    auto handle = hook_point(*tower->blocks[0], "test").register_forward_hook([&](HookPoint&, TensorRefs outputs) {
      outputs[0]->register_hook([&fail](const at::Tensor& grad) {
        TESSERA_CHECK(Error, !fail, "on purpose");
        return grad;
      });
    });
    for (uint64_t step = 0; step < 3; ++step) {
      loss_of(tower, rank, 3 * step).backward();
      const auto other = has_forward_between ? at::Tensor() : loss_of(tower, rank, 3 * step + 2);
      fail = true;
      expect_throws<Error>([&] { loss_of(tower, rank, 3 * step + 1).backward(); }, "on purpose");
      fail = false;
      TESSERA_EXPECT(tower->in->weight.grad().defined());  // of the first backward, whatever failed since
      tower->zero_grad();
      (has_forward_between ? loss_of(tower, rank, 3 * step + 2) : other).backward();
      average_reference(*pair.reference, 2, [&](int r) { loss_of(pair.reference, r, 3 * step + 2).backward(); });
      check_sharded_parity(pair.reference, tower, kExact);
      tower->zero_grad();
    }
  });
}

TEST_CASE("mixed precision computes in bfloat16 and keeps float32 shards and gradients") {
  run_ranks(2, [](int rank) {
    TowerPair pair;
    auto& tower = pair.sharded;
    fill_parameters(*pair.reference, 1);
    fill_parameters(*tower, 1);
    for (auto& block : tower->blocks) {
      fully_shard(block, {.mp_policy = {.param_dtype = at::kBFloat16}});
    }
    fully_shard(tower, {.mp_policy = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat}});
    at::ScalarType seen = at::kFloat;
    auto handle = hook_point(*tower->blocks[0], "test").register_forward_pre_hook([&](HookPoint&, TensorRefs in) {
      seen = in[0]->scalar_type();
    });
    auto out = tower(make_batch(static_cast<uint64_t>(rank), 3, 5));
    TESSERA_EXPECT(seen == at::kBFloat16);
    TESSERA_EXPECT(out.scalar_type() == at::kFloat);
    auto reference_out = pair.reference(make_batch(static_cast<uint64_t>(rank), 3, 5));
    expect_close(out.detach(), reference_out.detach(), {.rtol = 0.1, .atol = 0.1});
    weighted_loss(out).backward();
    TESSERA_EXPECT(tower->in->weight.grad().scalar_type() == at::kFloat);
    TESSERA_EXPECT(to_local(tower->in->weight.detach()).scalar_type() == at::kFloat);
    // A second call of the same unit gets a new gradient accumulator, since its dtype changed in between.
    auto x = make_batch(static_cast<uint64_t>(rank), 3, 17);
    weighted_loss(tower->blocks[0](tower->blocks[0](x)).to(at::kFloat)).backward();
  });
}

}  // namespace tessera::testing
