// Models that are not one tree of trainable units: several roots, units without parameters, frozen units, structs.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <torch/optim/sgd.h>

#include <utility>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "fully_shard/replicate.h"
#include "nn/modules.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

struct Batch {
  at::Tensor x;
  std::optional<at::Tensor> skip;
  int64_t step = 0;
};

auto tensor_fields(Batch& batch) {
  return std::tie(batch.x, batch.skip);
}

namespace {

/// Two towers, called one after the other or apart. No unit itself.
struct TwoTowersImpl : torch::nn::Module {
  TwoTowersImpl() {
    first = register_module("first", Tower());
    second = register_module("second", Tower(7, 3, 1));
  }
  at::Tensor forward(at::Tensor x) { return first(x) + second(x); }
  Tower first{nullptr}, second{nullptr};
};
TESSERA_MODULE(TwoTowers);

/// Takes and gives a struct, with an optional tensor in it.
struct StructLayerImpl : torch::nn::Module {
  StructLayerImpl() { fc = register_module("fc", nn::Linear(5, 5)); }
  Batch forward(Batch batch) {
    const auto y = fc(batch.x);
    return {.x = batch.skip ? y + *batch.skip : y, .skip = y, .step = batch.step + 1};
  }
  nn::Linear fc{nullptr};
};
TESSERA_MODULE(StructLayer);

/// Its output is a view of its weight.
struct PositionsImpl : torch::nn::Module {
  PositionsImpl() { weight = register_parameter("weight", make_batch(1, 9, 5)); }
  at::Tensor forward(int64_t rows) { return weight.narrow(0, 0, rows); }
  at::Tensor weight;
};
TESSERA_MODULE(Positions);

struct PlacedImpl : torch::nn::Module {
  PlacedImpl() {
    positions = register_module("positions", Positions());
    tower = register_module("tower", Tower());
  }
  at::Tensor forward(at::Tensor x) { return tower(x + positions(x.size(0))); }
  Positions positions{nullptr};
  Tower tower{nullptr};
};
TESSERA_MODULE(Placed);

struct StructNetImpl : torch::nn::Module {
  StructNetImpl() {
    for (const char* name : {"a", "b", "c"}) {
      layers.push_back(register_module(name, StructLayer()));
    }
  }
  Batch forward(Batch batch) {
    for (auto& layer : layers) {
      batch = layer(batch);
    }
    return batch;
  }
  std::vector<StructLayer> layers;
};
TESSERA_MODULE(StructNet);

template <class Model, class LossOf>
void expect_equal_gradients(Model& reference, Model& sharded, int rank, int world_size, LossOf&& loss_of) {
  reference->zero_grad();
  sharded->zero_grad();
  average_reference(*reference, world_size, [&](int r) { loss_of(reference, r).backward(); });
  loss_of(sharded, rank).backward();
  check_sharded_parity(reference, sharded, kExact);
}

}  // namespace

TEST_CASE("several roots in one model: together, apart, and one backward through both", "[unusual]") {
  run_ranks(2, [](int rank) {
    TwoTowers reference, sharded;
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    shard_tower(sharded->first);
    shard_tower(sharded->second);
    const auto both = [](TwoTowers& model, int r) { return weighted_loss(model(rank_batch(r))); };
    const auto one = [](TwoTowers& model, int r) { return weighted_loss(model->second(rank_batch(r))); };
    const auto reversed = [](TwoTowers& model, int r) {
      const auto second = model->second(rank_batch(r));
      return weighted_loss(model->first(rank_batch(r + 1)) * second);
    };
    for (int step = 0; step < 2; ++step) {
      expect_equal_gradients(reference, sharded, rank, 2, both);
      expect_equal_gradients(reference, sharded, rank, 2, one);
      expect_equal_gradients(reference, sharded, rank, 2, reversed);
    }
    expect_equal(fsdp(sharded->first).unsharded_bytes() + fsdp(sharded->second).unsharded_bytes(), 0u);
  });
}

TEST_CASE("what a unit prefetched of another model is gathered again where a step came between", "[unusual]") {
  const bool in_place = GENERATE(true, false);
  run_ranks(3, [&](int rank) {
    TwoTowers reference, sharded;
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    shard_tower(sharded->first);
    shard_tower(sharded->second);
    auto& block = sharded->second->blocks[0];
    if (!in_place) {
      fsdp(block).set_custom_all_gather(
          [](const at::Tensor& output, const at::Tensor& input, const ProcessGroupPtr& group) {
            return all_gather_async(output, input, group);
          });
    }
    fsdp(sharded->first).set_modules_to_forward_prefetch({{fsdp(block)}});
    const at::NoGradGuard no_grad;
    for (int step = 0; step < 3; ++step) {
      sharded->first(rank_batch(rank));
      expect_equal(fsdp(block).unit_state() == ShardedState::Unsharding, true);
      for (auto* model : {&reference, &sharded}) {
        for (auto& param : (*model)->second->parameters()) {
          param.mul_(0.5);
        }
      }
      if (step == 2) {
        fsdp(block).unshard();
        expect_bit_equal(block->up->weight, reference->second->blocks[0]->up->weight);
      }
      expect_bit_equal(sharded->second(rank_batch(rank)), reference->second(rank_batch(rank)));
    }
  });
}

TEST_CASE("an output that is a view of a parameter outlives the parameter's memory", "[unusual]") {
  const int world_size = GENERATE(1, 2, 3);
  const bool replicates = GENERATE(false, true);
  run_ranks(world_size, [&](int rank) {
    Placed reference, sharded;
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    replicates ? replicate(sharded->positions) : fully_shard(sharded->positions);
    fully_shard(sharded);
    const auto loss_of = [](Placed& model, int r) { return weighted_loss(model(rank_batch(r))); };
    for (int step = 0; step < 2; ++step) {
      expect_equal_gradients(reference, sharded, rank, world_size, loss_of);
      const at::NoGradGuard no_grad;
      const auto view = sharded->positions(4);
      expect_bit_equal(view, reference->positions(4));
      view.add_(1);
      check_sharded_parity(reference, sharded, kExact);
    }
  });
}

TEST_CASE("a forward that writes its parameters is refused, unless one rank has all of them", "[unusual]") {
  const int world_size = GENERATE(1, 2);
  const bool replicates = GENERATE(false, true);
  run_ranks(world_size, [&](int rank) {
    nn::Embedding table(torch::nn::EmbeddingOptions(7, 3).max_norm(0.1));
    replicates ? replicate(table) : fully_shard(table);
    const auto rows = at::arange(rank, rank + 3, at::kLong);
    if (world_size == 1) {
      TESSERA_EXPECT(table(rows).norm().item<float>() < 0.2);
      return;
    }
    expect_throws<StateError>([&] { table(rows); },
                              replicates ? "the other ranks' copies would not have" : "its shards would lose");
  });
}

/// A table whose gradient is sparse, or dense, and a layer in its place.
struct TableOrLayerImpl : torch::nn::Module {
  explicit TableOrLayerImpl(bool is_sparse)
      : table(register_module("table", nn::Embedding(torch::nn::EmbeddingOptions(7, 3).sparse(is_sparse)))),
        layer(register_module("layer", nn::Linear(2, 3))) {
    fill_parameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) { return x.is_floating_point() ? layer(x) : table(x); }

  nn::Embedding table;
  nn::Linear layer;
};
TESSERA_MODULE(TableOrLayer);

TEST_CASE("a sparse gradient is reduced as a dense one, also where other ranks have none", "[unusual]") {
  const bool syncs = GENERATE(true, false);
  const int rank_without = GENERATE(-1, 0, 2);
  run_ranks(3, [&](int rank) {
    TableOrLayer reference(/*is_sparse=*/false), sharded(/*is_sparse=*/true);
    fully_shard(sharded);
    const auto loss_of = [&](TableOrLayer& net, int of) {
      return net(of == rank_without ? make_batch(1, 3, 2) : at::arange(of, of + 3, at::kLong)).square().sum();
    };
    for (int micro_batch = syncs ? 1 : 0; micro_batch < 2; ++micro_batch) {
      for (int of = 0; of < 3; ++of) {
        (loss_of(reference, of) / 3).backward();
      }
      fsdp(sharded).set_requires_gradient_sync(micro_batch == 1);
      loss_of(sharded, rank).backward();
    }
    check_sharded_parity(reference->table, sharded->table);
  });
}

TEST_CASE("units without parameters, inside and as the root, send nothing and change nothing", "[unusual]") {
  run_ranks(3, [](int rank) {
    const auto make = [] {
      nn::Sequential net;
      net->push_back("fc", nn::Linear(5, 7));
      net->push_back("relu", nn::ReLU());
      net->push_back("out", nn::Linear(7, 3));
      fill_parameters(*net, 1);
      return net;
    };
    auto reference = make(), sharded = make();
    const auto children = sharded->children();
    for (const auto& child : children) {
      fully_shard(*child);
    }
    fully_shard(sharded);
    expect_equal(fsdp(sharded).num_parameters(), 0u);
    expect_equal(fsdp(*children[1]).num_parameters(), 0u);
    for (int step = 0; step < 2; ++step) {
      reset_comm_stats();
      expect_equal_gradients(reference, sharded, rank, 3,
                             [](nn::Sequential& net, int r) { return weighted_loss(net(rank_batch(r))); });
      expect_equal(comm_stats()[Collective::AllGather].calls, 4);
      expect_equal(comm_stats()[Collective::ReduceScatter].calls, 2);
    }
    fsdp(sharded).check_ready_for_step();
    fsdp(*children[1]).unshard();
    fsdp(*children[1]).reshard();
  });
}

TEST_CASE("frozen units are gathered and not reduced, and freezing may change from step to step", "[unusual]") {
  run_ranks(2, [](int rank) {
    Tower reference, sharded;
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    shard_tower(sharded);
    const auto freeze = [&](size_t block, bool frozen) {
      for (auto* tower : {&reference, &sharded}) {
        for (auto& param : (*tower)->blocks[block]->parameters()) {
          param.set_requires_grad(!frozen);
        }
      }
    };
    const auto loss_of = [](Tower& tower, int r) { return weighted_loss(tower(rank_batch(r))); };
    const auto reduced = [&] {
      reset_comm_stats();
      expect_equal_gradients(reference, sharded, rank, 2, loss_of);
      return comm_stats()[Collective::ReduceScatter].calls;
    };
    expect_equal(reduced(), 4);
    freeze(0, true);
    freeze(2, true);
    expect_equal(reduced(), 2);
    TESSERA_EXPECT(!sharded->blocks[0]->up->weight.grad().defined());
    freeze(2, false);
    expect_equal(reduced(), 3);
  });
}

TEST_CASE("structs go into units and come out of them, differentiable in every field", "[unusual]") {
  const bool reshards = GENERATE(true, false);
  run_ranks(3, [&](int rank) {
    StructNet reference, sharded;
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    for (auto& layer : sharded->layers) {
      fully_shard(layer, {.reshard_after_forward = reshards});
    }
    fully_shard(sharded, {.reshard_after_forward = reshards});
    expect_equal_gradients(reference, sharded, rank, 3, [](StructNet& net, int r) {
      const auto out = net(Batch{.x = rank_batch(r), .skip = std::nullopt});
      expect_equal(out.step, 3);
      return weighted_loss(out.x) + weighted_loss(*out.skip);
    });
    for (auto& layer : sharded->layers) {
      expect_equal(fsdp(layer).unsharded_bytes(), 0u);
    }
    StructNet low;
    fully_shard(low, {.mp_policy = {.param_dtype = at::kBFloat16, .output_dtype = at::kDouble}});
    const auto out = low(Batch{.x = rank_batch(rank), .skip = rank_batch(rank)});
    TESSERA_EXPECT(out.x.scalar_type() == at::kDouble && out.skip->scalar_type() == at::kDouble);
  });
}

TEST_CASE("a parameter that got another shape or device after sharding stops every rank, by name", "[unusual]") {
  const auto other = GENERATE(
      as<std::function<at::Tensor()>>(),
      [] {
        return at::zeros({4, 8});
      },
      [] {
        return at::zeros({2, 4}, at::kMeta);
      });
  run_ranks(2, [&](int rank) {
    testing::Block block(4, 4);
    fully_shard(block);
    if (rank == 1) {
      block->up->weight.set_data(other());
    }
    expect_throws<StateError>([&] { block(make_batch(1, 3, 4)); }, rank == 1 ? "the data of parameter 'up.weight'"
                                                                             : "rank 1: 'root', whose parameters were");
  });
}

TEST_CASE("reset_iter_state after an exception in forward or backward: all is as before the iteration", "[unusual]") {
  const bool in_backward = GENERATE(false, true);
  run_ranks(2, [&](int rank) {
    Tower reference, sharded;
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    shard_tower(sharded);
    auto handle = hook_point(*sharded->blocks[1], "test").register_forward_hook([&](HookPoint&, TensorRefs outputs) {
      TESSERA_CHECK(Error, in_backward, "on purpose");
      outputs[0]->register_hook([](const at::Tensor& grad) {
        TESSERA_CHECK(Error, !grad.defined(), "on purpose");
        return grad;
      });
    });
    const auto loss_of = [](Tower& tower, int r) { return weighted_loss(tower(rank_batch(r))); };
    expect_throws<Error>([&] { loss_of(sharded, rank).backward(); }, "on purpose");
    handle.remove();
    fsdp(sharded).reset_iter_state();
    for (auto& block : sharded->blocks) {
      TESSERA_EXPECT(fsdp(block).unit_state() == ShardedState::Sharded);
    }
    expect_equal(fsdp(sharded).memory_stats().acquired, 0u);
    expect_equal_gradients(reference, sharded, rank, 2, loss_of);
  });
}

TEST_CASE("the next forward recovers from an exception at the end of backward", "[unusual]") {
  const bool in_root = GENERATE(true, false);
  run_ranks(2, [&](int rank) {
    Tower reference, sharded;
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    shard_tower(sharded);
    // The root's gradients, and block0's in flight, are waited for after the graph has run.
    bool fails = true;
    auto unit = in_root ? fsdp(sharded) : fsdp(sharded->blocks[0]);
    unit.set_all_reduce_hook(
        [&](const at::Tensor&) { TESSERA_CHECK(Error, !std::exchange(fails, false), "on purpose"); });
    const auto loss_of = [](Tower& tower, int r) { return weighted_loss(tower(rank_batch(r))); };
    expect_throws<Error>([&] { loss_of(sharded, rank).backward(); }, "on purpose");
    for (int step = 0; step < 2; ++step) {
      expect_equal_gradients(reference, sharded, rank, 2, loss_of);
    }
    for (auto& block : sharded->blocks) {
      TESSERA_EXPECT(fsdp(block).unit_state() == ShardedState::Sharded);
    }
    expect_equal(fsdp(sharded).memory_stats().acquired, 0u);
  });
}

}  // namespace tessera::testing
