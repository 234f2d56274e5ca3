// What fully_shard refuses, and how it says so.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <stdexcept>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

struct ScalarParamImpl : torch::nn::Module {
  ScalarParamImpl() { scale = register_parameter("scale", at::ones({})); }
  at::Tensor forward(at::Tensor x) { return x * scale; }
  at::Tensor scale;
};
TESSERA_MODULE(ScalarParam);

struct SharedImpl : torch::nn::Module {
  SharedImpl() {
    a = register_module("a", tessera::nn::Linear(4, 4));
    b = register_module("b", tessera::nn::Linear(4, 4));
    b->weight = b->register_parameter("tied", a->weight);
  }
  at::Tensor forward(at::Tensor x) { return b(a(x)); }
  tessera::nn::Linear a{nullptr}, b{nullptr};
};
TESSERA_MODULE(Shared);

}  // namespace

TEST_CASE("a module whose type has no hook point is refused with the remedies") {
  run_ranks(2, [](int) {
    torch::nn::Linear stock(4, 4);
    expect_throws<StateError>([&] { fully_shard(stock); }, "torch::nn::LinearImpl");
    expect_throws<StateError>([&] { fully_shard(stock); }, "TESSERA_MODULE");
    expect_throws<StateError>([&] { fully_shard(stock); }, "hooked(");
  });
}

TEST_CASE("a unit twice, top-down wrapping, and a parameter of two units are refused") {
  run_ranks(2, [](int) {
    Tower tower;
    fully_shard(tower);
    expect_throws<StateError>([&] { fully_shard(tower); }, "unit already");
    expect_throws<ValueError>([&] { fully_shard(tower->blocks[0]); }, "Shard submodules before");
    expect_throws<ValueError>([&] { fully_shard(tower->blocks[0]); }, "block0.up.weight");
    Shared shared;
    fully_shard(shared->a);
    expect_throws<ValueError>([&] { fully_shard(shared->b); }, "that two modules share");
  });
}

TEST_CASE("scalars, mixed dtypes and meshes of three axes are refused by name") {
  run_ranks(4, [](int) {
    ScalarParam scalar;
    expect_throws<ValueError>([&] { fully_shard(scalar); }, "'scale' is a scalar");
    Block mixed(4, 4);
    mixed->up->weight.set_data(mixed->up->weight.to(at::kDouble));
    expect_throws<ValueError>([&] { fully_shard(mixed); }, "'up.bias' is Float");
    Block block(4, 4);
    auto cube = init_device_mesh(at::kCPU, {2, 2, 1}, {"pp", "dp", "tp"});
    expect_throws<ValueError>([&] { fully_shard(block, {.mesh = cube}); }, "{pp: 2, dp: 2, tp: 1}");
    auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    fully_shard(block, {.mesh = mesh["dp"]});
    expect_throws<StateError>([&] { fsdp(*block->up); },
                              "fsdp(torch::nn::LinearImpl): neither fully_shard nor replicate was called");
  });
}

TEST_CASE("complex parameters are refused where they are trained") {
  run_ranks(2, [](int) {
    Block block(4, 4);
    block->register_parameter("phase", at::ones({4}, at::kComplexFloat));
    expect_throws<NotImplementedError>([&] { fully_shard(block); }, "'phase' is ComplexFloat");
    expect_throws<NotImplementedError>([&] { fully_shard(block); }, "at::view_as_real()");
  });
}

TEST_CASE("a parameter that is used while sharded is named with its module and the remedy") {
  run_ranks(2, [](int) {
    Tower tower;
    shard_tower(tower);
    const auto use = [&] { tower->blocks[1]->up(make_batch(1, 3, 17)); };
    expect_throws<StateError>(use, "'up.bias' is sharded");
    expect_throws<StateError>(use, "BlockImpl");
    expect_throws<StateError>(use, "unshard()");
    fsdp(tower->blocks[1]).unshard();
    use();
    fsdp(tower->blocks[1]).reshard();
    expect_throws<StateError>(use, "'up.bias' is sharded");
  });
}

TEST_CASE("writes to a sharded parameter, and copies of it, are refused with a remedy that works") {
  run_ranks(2, [](int) {
    const at::NoGradGuard no_grad;
    auto tower = filled_tower();
    shard_tower(tower);
    auto& p = tower->in->weight;
    const auto value = make_batch(1, 17, 5), plain = at::empty({17, 5});
    expect_throws<StateError>([&] { p.copy_(value); }, "distribute_tensor(value, device_mesh(p), placements(p))");
    p.copy_(distribute_tensor(value, device_mesh(p), placements(p)));
    expect_throws<StateError>([&] { plain.copy_(p); }, "take full_tensor() of it");
    plain.copy_(full_tensor(p));
    TESSERA_EXPECT(plain.equal(value));
    // As torch::load.
    expect_throws<StateError>([&] { p.set_(value); }, "load before the model is sharded");
    expect_throws<StateError>([&] { p.set_(value); }, "dcp::set_model_state_dict(net, ");
  });
}

TEST_CASE("an optimizer step before backward is an error") {
  run_ranks(2, [](int) {
    Tower tower;
    fill_parameters(*tower, 1);
    torch::optim::SGD optimizer(tower->parameters(), torch::optim::SGDOptions(0.1));
    shard_tower(tower);
    expect_throws<StateError>([&] { fsdp(tower).check_ready_for_step(); }, "no parameter of");
    auto loss = weighted_loss(tower(make_batch(1, 3, 5)));
    expect_throws<StateError>([&] { fsdp(tower).check_ready_for_step(); }, "still awaits its backward");
    loss.backward();
    fsdp(tower).check_ready_for_step();
    optimizer.step();

    // Stale gradients: the root's parameters are unsharded and meet sharded gradients.
    auto second = weighted_loss(tower(make_batch(1, 3, 5)));
    expect_throws<StateError>([&] { optimizer.step(); }, "run backward() first");
    second.backward();
  });
}

TEST_CASE("parameters changed between forward and backward are an error that names one") {
  run_ranks(2, [](int) {
    Tower tower;
    fill_parameters(*tower, 1);
    shard_tower(tower, {.reshard_after_forward = true});
    torch::optim::SGD optimizer(tower->parameters(), torch::optim::SGDOptions(0.1));
    weighted_loss(tower(make_batch(1, 3, 5))).backward();
    auto loss = weighted_loss(tower(make_batch(1, 3, 5)));
    optimizer.step();
    expect_throws<StateError>([&] { loss.backward(); }, "changed in place between forward and backward");
  });
}

TEST_CASE("after an observer threw where forward begins, this model and the next one train on") {
  run_ranks(2, [](int rank) {
    const auto train = [&](Tower& tower, Tower& reference) {
      tower->zero_grad();
      reference->zero_grad();
      average_reference(*reference, 2, [&](int of) { micro_batch_loss(reference, of).backward(); });
      micro_batch_loss(tower, rank).backward();
      check_sharded_parity(reference, tower);
    };
    for (int model = 0; model < 2; ++model) {
      Tower reference = filled_tower(), tower = filled_tower();
      shard_tower(tower);
      const auto rows = to_local(tower->out->weight.detach());
      micro_batch_loss(tower, rank);  // leaves the root unsharded
      rows.mul_(1);                   // a write, so that the next forward gathers anew
      bool fails = true;
      fsdp(tower).set_event_observer([&](const FSDPEvent& event) {
        TESSERA_CHECK(KeyError, !fails || event.step != FSDPEventKind::Reshard, "no place for {}", to_string(event));
      });
      expect_throws<KeyError>([&] { micro_batch_loss(tower, rank); }, "no place for reshard root");
      fails = false;
      train(tower, reference);
    }
  });
}

TEST_CASE("converting a module after sharding is an error at its next use") {
  run_ranks(2, [](int) {
    Block block(4, 4);
    fully_shard(block);
    block->to(at::kDouble);
    expect_throws<StateError>([&] { block(make_batch(1, 3, 4)); }, "were replaced after fully_shard took it");
  });
}

TEST_CASE("converting a module while it is unsharded is an error at its next gather, on every rank") {
  const int world_size = GENERATE(1, 3);
  const bool is_forward = GENERATE(false, true);  // that leaves it unsharded
  run_ranks(world_size, [&](int rank) {
    Block block(4, 4);
    fully_shard(block);
    const int last = world_size - 1;
    const auto use = [&] { block(make_batch(1, 3, 4)); };
    if (is_forward) {
      use();
    } else {
      fsdp(block).unshard();
    }
    if (rank == last) {
      block->up->to(at::kDouble);
    }
    fsdp(block).reshard();
    for (int attempt = 0; attempt < 2; ++attempt) {
      expect_throws<StateError>(use, rank == last ? "the data of parameter 'up.weight' of"
                                                  : "rank 2: 'root', whose parameters were replaced");
    }
  });
}

TEST_CASE("what only one rank cannot do, no rank does, and all say why") {
  run_ranks(3, [](int rank) {
    Block block(4, 6);
    if (rank == 1) {
      block->up->weight.set_data(at::empty({4, 6}).t());
    }
    expect_throws<ValueError>([&] { fully_shard(block); }, "'up.weight' is not contiguous, sizes [6, 4]");
    if (rank != 1) {
      expect_throws<ValueError>([&] { fully_shard(block); }, "rank 1 cannot: fully_shard(");
    } else {
      block->up->weight.set_data(block->up->weight.contiguous());
      expect_throws<StateError>(
          [&] {
            block->up->weight.mutable_grad() = at::zeros({6, 4});
            fully_shard(block);
          },
          "'up.weight' has a gradient already");
      block->zero_grad();
    }
    fully_shard(block);
    expect_equal(fsdp(block).num_parameters(), 4u);
  });
}

TEST_CASE("what a user's function throws on one rank, all ranks throw") {
  run_ranks(3, [](int rank) {
    Block block(4, 6);
    const FullyShardOptions options{.shard_placement_fn = [rank](const at::Tensor&) -> std::optional<Shard> {
      if (rank == 1) {
        throw std::out_of_range("no such row");
      }
      return Shard(0);
    }};
    if (rank == 1) {
      expect_throws<std::out_of_range>([&] { fully_shard(block, options); }, "no such row");
    } else {
      expect_throws<ValueError>([&] { fully_shard(block, options); }, "no such row");
    }
    fully_shard(block);
  });
}

TEST_CASE("ranks that shard different modules, or in another order, learn of the first difference") {
  run_ranks(3, [](int rank) {
    Block block(4, rank == 2 ? 7 : 6);
    expect_throws<ValueError>([&] { fully_shard(block); },
                              "rank 0 has 'up.weight' Float[6, 4] Shard(0), rank 2 has 'up.weight' Float[7, 4]");
    Tower tower;
    torch::nn::Module* first = &*tower->blocks[0];
    torch::nn::Module* second = &*tower->norm;
    expect_throws<ValueError>([&] { fully_shard(rank == 1 ? *second : *first); },
                              "rank 1 has a unit fully_shard(torch::nn::Layer");
    Block even(4, 4);
    const FullyShardOptions options{.mp_policy = {.param_dtype = rank == 0 ? at::kFloat : at::kBFloat16}};
    expect_throws<ValueError>([&] { fully_shard(even, options); }, "param_dtype BFloat16");
    TESSERA_EXPECT(!is_dtensor(even->up->weight));
  });
}

TEST_CASE("ranks that run units of equal size in another order learn of it in the all-gather") {
  run_ranks(2, [](int rank) {
    Tower tower;
    shard_tower(tower);
    const at::NoGradGuard no_grad;
    tower(make_batch(1, 3, 5));
    if (rank == 1) {
      std::swap(tower->blocks[1], tower->blocks[2]);
    }
    for (int attempt = 0; attempt < 2; ++attempt) {
      expect_throws<StateError>([&] { tower->blocks[1](make_batch(1, 3, 17)); }, "rank 0: 'block1', rank 1: 'block2'");
    }
    std::swap(tower->blocks[1], tower->blocks[2]);
    if (rank == 0) {
      std::swap(tower->blocks[1], tower->blocks[2]);
    }
  });
}

TEST_CASE("parameters that one rank replaced stop all ranks at the unit's next use") {
  run_ranks(3, [](int rank) {
    Block block(4, 4);
    fully_shard(block);
    const auto shard = block->up->weight.detach(), copy = shard.clone();
    if (rank == 2) {
      block->up->weight.set_data(at::zeros({4, 5}));
    }
    const auto use = [&] { block(make_batch(1, 3, 4)); };
    if (rank == 2) {
      expect_throws<StateError>(use, "the data of parameter 'up.weight' of");
    } else {
      expect_throws<StateError>(use, "rank 2: 'root', whose parameters were replaced");
    }
    if (rank == 2) {
      block->up->weight.set_data(copy);
    }
    expect_throws<StateError>(use, rank == 2 ? "were replaced" : "rank 2: 'root', whose parameters were replaced");
    if (rank == 2) {
      block->up->weight.set_data(shard);
    }
    use();
  });
}

TEST_CASE("a unit that is in the middle of an iteration cannot get another root") {
  run_ranks(2, [](int) {
    Tower tower;
    shard_tower(tower);
    auto loss = tower->blocks[0](make_batch(1, 3, 17)).sum();
    const auto use = [&] { tower(make_batch(1, 3, 5)); };
    expect_throws<StateError>(use, "takes over the unit 'block0', which still awaits the backward");
    loss.backward();
    use();
  });
}

TEST_CASE("a graph that one rank keeps lets no rank give its unit another root, until it is dropped") {
  run_ranks(3, [](int rank) {
    Tower tower;
    shard_tower(tower);
    auto kept = tower->blocks[0](make_batch(1, 3, 17)).sum();
    if (rank != 1) {
      kept = at::Tensor();
    }
    const auto use = [&] { tower(make_batch(1, 3, 5)); };
    for (int attempt = 0; attempt < 2; ++attempt) {
      expect_throws<StateError>(use, "takes over the unit 'block0', which still awaits the backward");
      expect_throws<StateError>(use, rank == 1 ? "fully_shard: forward of" : "rank 1 cannot: fully_shard: forward of");
    }
    kept = at::Tensor();
    use();
  });
}

TEST_CASE("a unit that is made after the first forward of the model around it is refused") {
  run_ranks(2, [](int) {
    Tower tower;
    fully_shard(tower->blocks[0]);
    fully_shard(tower, {.ignored_params = tower->blocks[1]->parameters()});
    tower(make_batch(1, 3, 5));
    fully_shard(tower->blocks[1]);
    expect_throws<StateError>([&] { tower(make_batch(1, 3, 5)); }, "became a unit after the forward");
  });
}

TEST_CASE("lists of modules: empty, twice the same, and units already are refused") {
  run_ranks(2, [](int) {
    Tower tower;
    expect_throws<ValueError>([&] { fully_shard(std::vector<torch::nn::Module*>{}); }, "is empty");
    expect_throws<ValueError>([&] { fully_shard({&*tower->in, &*tower->in}); }, "is in it twice");
    fully_shard({&*tower->in, &*tower->out});
    expect_throws<StateError>([&] { fully_shard(*tower->out); }, "unit already");
    expect_throws<ValueError>([&] { fsdp(*tower->in).set_modules_to_forward_prefetch({{fsdp(*tower->out)}}); },
                              "prefetch itself");
  });
}

}  // namespace tessera::testing
