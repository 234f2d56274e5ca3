// Checkpointed regions of sharded models: DTensor activations, and fully_shard units inside, outside and around.

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <torch/library.h>
#include <torch/optim/adam.h>

#include "activation_checkpoint/checkpoint.h"
#include "comm/context/comm_stats.h"
#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dtensor.h"
#include "dtensor/random/random.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "tests/fully_shard/models/train_and_compare.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

bool is_root(const std::string& name, torch::nn::Module&) {
  return name.empty();
}

/// Three pairs of blocks, each pair a module of its own.
struct PairImpl : torch::nn::Module {
  PairImpl() {
    first = register_module("first", Block(17, 13));
    second = register_module("second", Block(17, 11));
  }
  at::Tensor forward(at::Tensor x) { return second(first(x)); }

  Block first{nullptr}, second{nullptr};
};
TESSERA_MODULE(Pair);

struct PairsImpl : torch::nn::Module {
  PairsImpl() {
    for (int i = 0; i < 3; ++i) {
      pairs.push_back(register_module("pair" + std::to_string(i), Pair()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& pair : pairs) {
      x = pair(x);
    }
    return x;
  }

  std::vector<Pair> pairs;
};
TESSERA_MODULE(Pairs);

at::Tensor one_more(const at::Tensor& x) {
  return x + 1;
}

TORCH_LIBRARY(tessera_checkpoint_test, library) {
  library.def("no_rule(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(tessera_checkpoint_test, CPU, library) {
  library.impl("no_rule", &one_more);
}

}  // namespace

TEST_CASE("checkpointed blocks that are fully_shard units train as one process, bit for bit") {
  const int world_size = GENERATE(1, 2, 3, 4);
  run_ranks(world_size, [&](int rank) {
    train_and_compare(
        rank, world_size, OptimizerBuilt::BeforeSharding,
        [](Tower& tower) {
          apply_activation_checkpointing(*tower, is_block);
          shard_tower(tower);
        },
        0);
  });
}

TEST_CASE("a checkpointed root, with units inside of the region, trains as one process, bit for bit") {
  const int world_size = GENERATE(1, 2, 3);
  const bool reshard_after_forward = GENERATE(true, false);
  const bool early_stop = GENERATE(true, false);
  run_ranks(world_size, [&](int rank) {
    train_and_compare(
        rank, world_size, OptimizerBuilt::AfterSharding,
        [&](Tower& tower) {
          apply_activation_checkpointing(*tower, is_root, {.early_stop = early_stop});
          shard_tower(tower, {.reshard_after_forward = reshard_after_forward});
        },
        0);
  });
}

TEST_CASE("a checkpointed unit is gathered once in forward and once in backward, as without checkpointing") {
  run_ranks(2, [](int rank) {
    Tower plain, checkpointed;
    fill_parameters(*plain, 1);
    fill_parameters(*checkpointed, 1);
    apply_activation_checkpointing(*checkpointed, is_block);
    const auto gathers_of = [&](Tower& tower) {
      shard_tower(tower);
      reset_comm_stats();
      weighted_loss(tower(make_batch(static_cast<uint64_t>(rank), 3, 5))).backward();
      expect_equal(fsdp(tower).unsharded_bytes(), 0u);
      return comm_stats()[Collective::AllGather].calls;
    };
    expect_equal(gathers_of(plain), 7);
    expect_equal(gathers_of(checkpointed), 7);
  });
}

TEST_CASE("units inside of a checkpointed module are gathered once more in its backward") {
  const int world_size = GENERATE(2, 3);
  run_ranks(world_size, [&](int rank) {
    Pairs reference, model;
    fill_parameters(*reference, 1);
    fill_parameters(*model, 1);
    for (auto& pair : model->pairs) {
      checkpoint_module(*pair);
      fully_shard(pair->first);
      fully_shard(pair->second);
    }
    fully_shard(model);
    const auto loss_of = [](Pairs& pairs, int r) {
      return weighted_loss(pairs(make_batch(static_cast<uint64_t>(r), 3, 17)));
    };
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      reset_comm_stats();
      loss_of(model, rank).backward();
      expect_equal(comm_stats()[Collective::AllGather].calls, 12);
      expect_equal(comm_stats()[Collective::ReduceScatter].calls, 6);
      expect_equal(fsdp(model).unsharded_bytes(), 0u);
      average_reference(*reference, world_size, [&](int r) { loss_of(reference, r).backward(); });
      check_sharded_parity(reference, model, {.tolerance = {.rtol = 0, .atol = 0}});
    }
  });
}

TEST_CASE("activations of a region may be DTensors, whose random numbers are drawn again") {
  const int world_size = GENERATE(1, 2, 3);
  run_ranks(world_size, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {world_size}, {"tp"});
    const auto run = [&](bool checkpointed) {
      manual_seed(5);
      const auto x = distribute_tensor(make_batch(1, 5, 7), mesh, {Shard(0)}).requires_grad_();
      const auto w = distribute_tensor(make_batch(2, 7, 3), mesh, {Shard(1)}).requires_grad_();
      const auto function = [&](const at::Tensor& y) {
        return at::dropout(redistribute(y, {Replicate()}).mm(w).tanh(), 0.5, true).sin();
      };
      const auto out = checkpointed ? checkpoint(function, x) : function(x);
      out.sum().backward();
      return std::vector{full_tensor(out.detach()), full_tensor(x.grad()), full_tensor(w.grad())};
    };
    const auto kept = run(true), plain = run(false);
    for (size_t i = 0; i < kept.size(); ++i) {
      expect_bit_equal(kept[i], plain[i]);
    }
  });
}

TEST_CASE("ops without a rule run in the second forward where they did in the first") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    const auto x = distribute_tensor(make_batch(1, 5, 7), mesh, {Shard(0)}).requires_grad_();
    const auto no_rule = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera_checkpoint_test::no_rule", "")
                             .typed<at::Tensor(const at::Tensor&)>();
    at::Tensor out;
    {
      const ReplicateAndRun scope;
      out = checkpoint([&](const at::Tensor& y) { return y.tanh() * no_rule.call(y.detach()); }, x);
    }
    out.sum().backward();
    const auto x2 = make_batch(1, 5, 7).requires_grad_();
    (x2.tanh() * (x2.detach() + 1)).sum().backward();
    expect_close(full_tensor(x.grad()), x2.grad());
  });
}

TEST_CASE("scopes of DTensor around the first forward hold in the second") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    const auto x = distribute_tensor(make_batch(1, 5, 7), mesh, {Shard(0)}).requires_grad_();
    const auto plain = make_batch(2, 1, 7);
    at::Tensor out;
    {
      const ImplicitReplication scope;
      out = checkpoint([&](const at::Tensor& y) { return (y + plain).tanh().sin(); }, x);
    }
    out.sum().backward();
    const auto x2 = make_batch(1, 5, 7).requires_grad_();
    (x2 + plain).tanh().sin().sum().backward();
    expect_close(full_tensor(x.grad()), x2.grad());
  });
}

}  // namespace tessera::testing
