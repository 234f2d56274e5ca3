// Parameters that are trained in one backward and frozen in the next, as an adversary's are.

#include <ATen/TensorOperators.h>
#include <torch/optim/sgd.h>

#include <algorithm>

#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// As average_reference, but added to the gradients that are there, as backward adds.
void add_average(Tower& reference, int world_size, int step) {
  const auto params = reference->parameters();
  std::vector<at::Tensor> before;
  for (const auto& param : params) {
    before.push_back(param.grad());
  }
  average_reference(*reference, world_size, [&](int r) { micro_batch_loss(reference, r, step).backward(); });
  for (size_t i = 0; i < params.size(); ++i) {
    if (before[i].defined()) {
      const auto& grad = params[i].grad();
      params[i].mutable_grad() = grad.defined() ? before[i] + grad : before[i];
    }
  }
}

/// Those of whole units, or of parts of three units.
std::vector<at::Tensor> adversary(Tower& tower, bool of_whole_units) {
  auto& blocks = tower->blocks;
  const auto params = of_whole_units ? std::vector{blocks[1]->parameters(), blocks[2]->parameters()}
                                     : std::vector{tower->norm->parameters(), tower->out->parameters(),
                                                   blocks[1]->down->parameters(), blocks[2]->up->parameters()};
  std::vector<at::Tensor> all;
  for (const auto& some : params) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

std::vector<at::Tensor> others(Tower& tower, const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> rest;
  for (const auto& param : tower->parameters()) {
    if (std::ranges::none_of(params, [&](const at::Tensor& other) { return other.is_same(param); })) {
      rest.push_back(param);
    }
  }
  return rest;
}

/// A model whose adversary has an optimizer of its own.
struct Trained {
  Tower tower;
  std::vector<at::Tensor> params;
  torch::optim::SGD of_adversary, of_others;

  Trained(Tower model, bool of_whole_units)
      : tower(std::move(model)),
        params(adversary(tower, of_whole_units)),
        of_adversary(params, 0.1),
        of_others(others(tower, params), 0.1) {}

  void freeze(bool frozen) {
    for (auto& param : params) {
      param.set_requires_grad(!frozen);
    }
  }
};

Tower new_tower() {
  Tower tower;
  fill_parameters(*tower, 1);
  return tower;
}

}  // namespace

TEST_CASE("gradients of frozen parameters stay, and their optimizer's zero_grad clears them", "[frozen]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const bool of_whole_units = GENERATE(true, false);
  run_ranks(world_size, [&](int rank) {
    auto sharded_tower = new_tower();
    shard_tower(sharded_tower);
    Trained reference(new_tower(), of_whole_units), sharded(sharded_tower, of_whole_units);
    const auto backward = [&](int step) {
      add_average(reference.tower, world_size, step);
      micro_batch_loss(sharded.tower, rank, step).backward();
      check_sharded_parity(reference.tower, sharded.tower, kExact);
    };
    for (int step = 0; step < 6; step += 2) {
      for (auto* model : {&reference, &sharded}) {
        model->of_adversary.zero_grad();
      }
      backward(step);
      for (auto* model : {&reference, &sharded}) {
        model->of_adversary.step();
        model->freeze(true);
        model->of_others.zero_grad();
      }
      backward(step + 1);
      TESSERA_EXPECT(sharded.params[0].grad().defined());
      for (auto* model : {&reference, &sharded}) {
        model->of_others.step();
        model->freeze(false);
      }
      check_sharded_parity(reference.tower, sharded.tower, kExact);
    }
  });
}

TEST_CASE("gradients of frozen parameters stay where the others' wait for their all-reduce", "[frozen]") {
  run_ranks(4, [](int rank) {
    auto tower = new_tower();
    shard_tower(tower, {.mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"})});
    Trained model(tower, /*of_whole_units=*/false);
    micro_batch_loss(tower, rank, 0).backward();
    std::vector<at::Tensor> before;
    for (const auto& param : model.params) {
      before.push_back(to_local(param.grad()).clone());
    }
    model.freeze(true);
    for (const bool all_reduces : {false, true}) {
      fsdp(tower).set_requires_all_reduce(all_reduces);
      micro_batch_loss(tower, rank, 1).backward();
      for (size_t i = 0; i < before.size(); ++i) {
        TESSERA_EXPECT(model.params[i].grad().defined());
        expect_bit_equal(to_local(model.params[i].grad()), before[i]);
      }
    }
  });
}

TEST_CASE("freezing a unit whose sums wait for their all-reduce is refused by the backward that would do it",
          "[frozen]") {
  run_ranks(4, [](int rank) {
    auto tower = new_tower();
    shard_tower(tower, {.mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"})});
    fsdp(tower).set_requires_all_reduce(false);
    micro_batch_loss(tower, rank, 0).backward();
    fsdp(tower).set_requires_all_reduce(true);
    for (auto& param : tower->blocks[0]->parameters()) {
      param.set_requires_grad(false);
    }
    auto loss = micro_batch_loss(tower, rank, 1);
    expect_throws<StateError>([&] { loss.backward(); }, "were frozen while gradients of theirs");
    fsdp(tower).reset_iter_state();
    tower->zero_grad();
    micro_batch_loss(tower, rank, 1).backward();
    TESSERA_EXPECT(!tower->blocks[0]->up->weight.grad().defined());
    TESSERA_EXPECT(tower->blocks[1]->up->weight.grad().defined());
  });
}

TEST_CASE("ranks that freeze different parameters of equal size are an error on all that names one", "[frozen]") {
  const int world_size = GENERATE(2, 3, 4);
  const auto reduce_dtype = GENERATE(at::kFloat, at::kBFloat16);
  const bool replicates = GENERATE(false, true);
  run_ranks(world_size, [&](int rank) {
    auto tower = new_tower();
    if (replicates) {
      replicate(tower, {.mp_policy = {.reduce_dtype = reduce_dtype}});
    } else {
      shard_tower(tower, {.mp_policy = {.reduce_dtype = reduce_dtype}});
    }
    micro_batch_loss(tower, rank, 0).backward();
    const auto before = to_local(tower->out->weight.grad()).clone();
    auto& of_root = rank == 0 ? tower->norm->weight : tower->norm->bias;
    auto& of_all = tower->blocks[rank == 0 ? 1 : 2]->up->weight;
    (replicates ? of_all : of_root).set_requires_grad(false);
    auto loss = micro_batch_loss(tower, rank, 1);
    expect_throws<StateError>([&] { loss.backward(); }, "is trained on this rank, and frozen");
    fsdp(tower).reset_iter_state();
    expect_bit_equal(to_local(tower->out->weight.grad()), before);
  });
}

TEST_CASE("a parameter that a hook freezes within backward keeps the gradient that it had", "[frozen]") {
  const bool is_last_of_unit = GENERATE(true, false);
  run_ranks(2, [&](int rank) {
    auto tower = new_tower();
    shard_tower(tower);
    auto& block = tower->blocks[1];
    micro_batch_loss(tower, rank, 0).backward();
    const auto before = to_local(block->up->weight.grad()).clone();
    const auto freeze = [](torch::nn::Module& module) {
      for (auto& param : module.parameters()) {
        param.set_requires_grad(false);
      }
    };
    if (is_last_of_unit) {
      freeze(*block->down);
    }
    auto handle = hook_point(*block->up, "test").register_forward_hook([&](HookPoint& up, TensorRefs outputs) {
      outputs[0]->register_hook([&](const at::Tensor& grad) {
        freeze(up.module());
        return grad;
      });
    });
    micro_batch_loss(tower, rank, 1).backward();
    TESSERA_EXPECT(block->up->weight.grad().defined() && block->down->weight.grad().defined());
    expect_bit_equal(to_local(block->up->weight.grad()), before);
  });
}

}  // namespace tessera::testing
