// FullyShardedDataParallel: what is wrapped, over which ranks, in which dtypes, and that it trains as the plain model.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "comm/collectives.h"
#include "dtensor/dtensor.h"
#include "fully_shard/replica_check.h"
#include "nn/linear.h"
#include "nn/sequential.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"
#include "testing/expect.h"
#include "testing/fsdp_models/patches.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("row 53: an optimizer that was built before wrapping moves the shards") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      auto tower = make_tower(), reference = make_tower();
      const auto before = tower->parameters();
      torch::optim::Adam optimizer(before, 1e-2), reference_optimizer(reference->parameters(), 1e-2);
      const FullyShardedDataParallel model(tower, {.auto_wrap_policy = block_policy()});
      for (size_t i = 0; i < before.size(); ++i) {
        TESSERA_EXPECT(before[i].is_same(model->parameters()[i]));
        TESSERA_EXPECT(is_dtensor(before[i]));
      }
      for (int step = 0; step < 3; ++step) {
        reference_optimizer.zero_grad();
        average_reference(*reference, ranks, [&](int of) { weighted_loss(reference(batch_of(of))).backward(); });
        reference_optimizer.step();
        optimizer.zero_grad();
        weighted_loss(model(batch_of(get_rank()))).backward();
        optimizer.step();
        check_sharded_parity(*reference, *model, {.tolerance = {.rtol = 1e-5, .atol = 1e-5}});
      }
      const auto initial = make_tower();
      TESSERA_EXPECT((full_tensor(model->in->weight.detach()) - initial->in->weight).abs().max().item<float>() > 1e-3);
      // What the optimizer keeps is of this rank's rows.
      const auto& state = optimizer.state().at(before[0].unsafeGetTensorImpl());
      const auto& moment = static_cast<const torch::optim::AdamParamState&>(*state).exp_avg();
      TESSERA_EXPECT(placements(moment) == placements(before[0]));
    });
  }
}

TEST_CASE("rows 56, 59, 73: every strategy has the plain model's gradients; what is freed after forward differs") {
  for (const int world_size : {2, 4}) {
    run_ranks(world_size, [&](int) {
      for (const auto strategy : kAllStrategies) {
        const FullyShardedDataParallel model(make_tower(),
                                             {.sharding_strategy = strategy, .auto_wrap_policy = block_policy()});
        expect_equal(unit_names(*model), std::vector<std::string>{"", "block0", "block1"});
        const auto loss = weighted_loss(model(batch_of(get_rank())));
        const bool frees = strategy == Strategy::FULL_SHARD || strategy == Strategy::HYBRID_SHARD;
        expect_equal(is_dtensor(model->blocks[0]->up->weight), frees);
        loss.backward();
        TESSERA_EXPECT(is_dtensor(model->blocks[0]->up->weight));
        model->zero_grad();
        expect_gradients_of_average(model);
        for (const auto& unit : FSDP::fsdp_modules(*model)) {
          expect_equal(unit.sharding_strategy() == strategy, true);
          TESSERA_EXPECT(unit.device_mesh() == model.device_mesh() && !unit.options().auto_wrap_policy);
        }
      }
    });
  }
  run_ranks(1, [](int) {
    const FullyShardedDataParallel model(make_tower());
    TESSERA_EXPECT(model.sharding_strategy() == Strategy::NO_SHARD);
    expect_gradients_of_average(model);
  });
}

TEST_CASE("row 58: a group, a pair and a mesh mean the same; both are refused") {
  run_ranks(4, [](int rank) {
    const int64_t other = rank ^ 1, replica = rank ^ 2;
    const auto shard = new_group({std::min<int64_t>(rank, other), std::max<int64_t>(rank, other)}, "shard");
    const auto replicate = new_group({std::min<int64_t>(rank, replica), std::max<int64_t>(rank, replica)}, "replicate");
    const FSDPProcessGroup pair(shard, replicate);
    const FullyShardedDataParallel by_pair(make_tower(),
                                           {.process_group = pair, .sharding_strategy = Strategy::HYBRID_SHARD});
    expect_equal(by_pair.device_mesh().shape(), std::vector<int64_t>{2, 2});
    expect_gradients_of_average(by_pair);
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"});
    const FullyShardedDataParallel by_mesh(make_tower(),
                                           {.sharding_strategy = Strategy::HYBRID_SHARD, .device_mesh = mesh});
    TESSERA_EXPECT(by_mesh.device_mesh() == mesh);
    expect_gradients_of_average(by_mesh);
    const FullyShardedDataParallel by_group(make_tower(), {.process_group = FSDPProcessGroup(shard)});
    expect_equal(by_group.device_mesh().ranks(), group_ranks(shard));
    const FullyShardedDataParallel apart(make_tower(), {.process_group = FSDPProcessGroup(replicate)});
    expect_equal(apart.device_mesh().ranks(), group_ranks(replicate));

    const auto wrap = [&](FSDPOptions options) { wrap_module(*make_tower(), std::move(options)); };
    expect_throws<ValueError>([&] { wrap({.process_group = pair, .device_mesh = mesh}); }, "both given");
    expect_throws<ValueError>([&] { wrap({.process_group = pair}); }, "FULL_SHARD takes one group");
    expect_throws<ValueError>([&] { wrap({.device_mesh = mesh}); }, "FULL_SHARD needs one axis");
    expect_throws<ValueError>([&] { wrap({.sharding_strategy = Strategy::HYBRID_SHARD}); }, "give process_group");
  });
}

TEST_CASE("hybrid strategies take the ranks of a host, as the launcher tells, for shards") {
  const auto mesh_shape = [](const char* ranks_on_host) {
    setenv("LOCAL_WORLD_SIZE", ranks_on_host, /*overwrite=*/1);
    std::vector<int64_t> shape;
    run_ranks(4, [&](int rank) {
      const FullyShardedDataParallel model(
          make_tower(), {.sharding_strategy = Strategy::HYBRID_SHARD, .auto_wrap_policy = block_policy()});
      if (rank == 0) {
        shape = model.device_mesh().shape();
      }
    });
    return shape;
  };
  CHECK(mesh_shape("2") == std::vector<int64_t>{2, 2});
  CHECK(mesh_shape("4") == std::vector<int64_t>{1, 4});
  CHECK_THROWS_WITH(mesh_shape("3"), Catch::Matchers::ContainsSubstring("3 ranks on this host do not divide the 4"));
  unsetenv("LOCAL_WORLD_SIZE");
}

TEST_CASE("row 63: mixed precision: dtypes inside of forward, of shards and of buffers; norms stay in full precision") {
  run_ranks(2, [](int) {
    auto tower = make_tower();
    tower->register_buffer("scale", at::ones({3}));
    std::vector<at::ScalarType> seen;
    const auto record = [&](torch::nn::Module& module, const at::Tensor& weight) {
      find_hook_point(module)->register_forward_pre_hook([&seen, weight](HookPoint&, TensorRefs inputs) {
        seen.push_back(inputs[0]->scalar_type());
        seen.push_back(weight.scalar_type());
      });
    };
    MixedPrecision precision{.param_dtype = at::kBFloat16, .buffer_dtype = at::kHalf};
    precision.module_classes_to_ignore = module_classes<torch::nn::LayerNormImpl>();
    const FullyShardedDataParallel model(tower, {.auto_wrap_policy = block_policy(), .mixed_precision = precision});
    record(*model->blocks[1], model->blocks[1]->up->weight);
    record(*model->norm, model->norm->weight);
    const auto out = model(batch_of(get_rank()));
    using Types = std::vector<at::ScalarType>;
    TESSERA_EXPECT((seen == Types{at::kBFloat16, at::kBFloat16, at::kFloat, at::kFloat}));
    TESSERA_EXPECT(out.scalar_type() == at::kBFloat16);
    weighted_loss(out.to(at::kFloat)).backward();
    for (const auto& parameter : model->parameters()) {
      TESSERA_EXPECT(parameter.scalar_type() == at::kFloat && parameter.grad().scalar_type() == at::kFloat);
    }
    TESSERA_EXPECT(model->named_buffers()["scale"].scalar_type() == at::kHalf);
    TESSERA_EXPECT(model.mixed_precision_enabled_for_buffers());
    TESSERA_EXPECT(FSDP::state_dict(*model)["scale"].scalar_type() == at::kFloat);
  });
}

TEST_CASE("row 63: the dtype in which gradients are reduced: reduce_dtype, else param_dtype, else the parameters'") {
  const auto strategy = GENERATE(Strategy::FULL_SHARD, Strategy::NO_SHARD);
  struct Dtypes {
    std::optional<at::ScalarType> param, reduce;
    at::ScalarType expected;
  };
  for (const auto& [param, reduce, expected] :
       {Dtypes{at::kBFloat16, at::kFloat, at::kFloat}, Dtypes{at::kBFloat16, std::nullopt, at::kBFloat16},
        Dtypes{std::nullopt, at::kBFloat16, at::kBFloat16}, Dtypes{std::nullopt, std::nullopt, at::kFloat}}) {
    run_ranks(2, [&, param = param, reduce = reduce, expected = expected](int) {
      const auto model = make_model(
          {.sharding_strategy = strategy, .mixed_precision = {.param_dtype = param, .reduce_dtype = reduce}});
      std::vector<at::ScalarType> reduced;
      {
        const auto scatter =
            patch_reduce_scatter([&](const ReduceScatterFn& original, const at::Tensor& output, const at::Tensor& input,
                                     ReduceOp op, const ProcessGroupPtr& group) {
              TESSERA_EXPECT(output.scalar_type() == input.scalar_type());
              reduced.push_back(input.scalar_type());
              return original(output, input, op, group);
            });
        const auto all = patch_all_reduce(
            [&](const AllReduceFn& original, const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group) {
              reduced.push_back(tensor.scalar_type());
              return original(tensor, op, group);
            });
        run_backward(model);
      }
      TESSERA_EXPECT(reduced == std::vector<at::ScalarType>(3, expected));
      for (const auto& parameter : model->parameters()) {
        TESSERA_EXPECT(parameter.scalar_type() == at::kFloat && parameter.grad().scalar_type() == at::kFloat);
      }
    });
  }
}

TEST_CASE("row 64: what is ignored stays as it is on every rank; both lists are refused") {
  run_ranks(2, [](int rank) {
    auto tower = make_tower();
    const FullyShardedDataParallel inner(tower->blocks[1]->up);
    const FullyShardedDataParallel model(tower, {.ignored_modules = {tower->blocks[1].get()}});
    expect_equal(unit_names(*model), std::vector<std::string>{"", "block1.up"});
    TESSERA_EXPECT(is_dtensor(tower->blocks[1]->up->weight));
    TESSERA_EXPECT(!is_dtensor(tower->blocks[1]->down->weight));
    TESSERA_EXPECT(is_dtensor(tower->blocks[0]->down->weight));
    weighted_loss(model(batch_of(get_rank()))).backward();
    const auto own = tower->blocks[1]->down->weight.grad().clone();
    at::Tensor both = own.clone();
    all_reduce(both, ReduceOp::Sum, default_group());
    TESSERA_EXPECT((both - own * 2).abs().max().item<float>() > 1e-6);  // not reduced: the ranks differ
    static_cast<void>(rank);

    auto other = make_tower();
    wrap_module(*other, {.ignored_states = {other->in->weight}});
    TESSERA_EXPECT(!is_dtensor(other->in->weight) && is_dtensor(other->in->bias));
    auto third = make_tower();
    expect_throws<ValueError>(
        [&] { wrap_module(*third, {.ignored_modules = {third->out.get()}, .ignored_states = {third->in->weight}}); },
        "ignored_modules and ignored_states are both given");
    wrap_module(*third->out);
    expect_throws<ValueError>([&] { wrap_module(*third, {.ignored_modules = {third->out.get()}}); },
                              "which is wrapped itself");
  });
}

TEST_CASE("row 65: param_init_fn fills every module on the meta device once, before it is sharded") {
  const auto full_of = [](int world_size) {
    at::Tensor full;
    run_ranks(world_size, [&](int rank) {
      Tower tower(8, 6, 2);
      for (const auto& parameter : tower->parameters()) {
        const auto without_memory = at::empty_like(parameter.detach(), at::kMeta);
        parameter.unsafeGetTensorImpl()->shallow_copy_from(without_memory.getIntrusivePtr());
      }
      expect_throws<ValueError>([&] { wrap_module(*tower, {.auto_wrap_policy = block_policy()}); },
                                "is on the meta device; give param_init_fn");
      int calls = 0;
      const FullyShardedDataParallel model(
          tower, {.auto_wrap_policy = block_policy(), .param_init_fn = [&](torch::nn::Module& module) {
                    ++calls;
                    double value = 0;
                    for (auto& parameter : module.parameters(/*recurse=*/false)) {
                      TESSERA_EXPECT(!is_dtensor(parameter));
                      parameter.fill_(value += 0.25);
                    }
                  }});
      expect_equal(calls, 7);
      const at::NoGradGuard no_grad;
      model(batch_of(get_rank()));
      const auto own = full_tensor(model->blocks[1]->down->bias.detach());
      if (rank == 0) {
        full = own;
      }
    });
    return full;
  };
  CHECK(full_of(1).sum().item<float>() == 4.f);
  CHECK(full_of(2).sum().item<float>() == 4.f);
}

TEST_CASE("rows 65, 116: what param_init_fn throws on one rank, all ranks throw") {
  run_ranks(3, [](int rank) {
    Tower tower(8, 6, 2);
    for (const auto& parameter : tower->parameters()) {
      const auto without_memory = at::empty_like(parameter.detach(), at::kMeta);
      parameter.unsafeGetTensorImpl()->shallow_copy_from(without_memory.getIntrusivePtr());
    }
    const auto fill = [&](torch::nn::Module& module) {
      TESSERA_CHECK(KeyError, rank != 1, "no values");
      for (auto& parameter : module.parameters(/*recurse=*/false)) {
        parameter.fill_(1);
      }
    };
    const auto wrap = [&] { wrap_module(*tower, {.param_init_fn = fill, .sync_module_states = true}); };
    rank == 1 ? expect_throws<KeyError>(wrap, "no values")
              : expect_throws<ValueError>(wrap, "rank 1 cannot: no values");
  });
}

TEST_CASE("rows 58, 116: groups that make no grid are refused on every rank") {
  run_ranks(4, [](int rank) {
    const auto wrap = [&](const std::vector<std::vector<int64_t>>& groups) {
      const auto own =
          std::ranges::find_if(groups, [&](const auto& ranks) { return std::ranges::count(ranks, rank) > 0; });
      wrap_module(*make_tower(), {.process_group = FSDPProcessGroup(new_group(*own))});
    };
    expect_throws<Error>(
        [&] {
          wrap({{0, 1, 2}, {3}});
        },
        rank == 3 ? "rank 0 cannot: FullyShardedDataParallel: a group of ranks" : "is no axis of a grid");
    expect_throws<Error>(
        [&] {
          wrap({{0, 2}, {1}, {3}});
        },
        "the ranks differ: rank 0 has groups of 2 ranks, at equal distances");
  });
}

TEST_CASE("row 67: sync_module_states: rank 0's parameters and buffers win, in nested units too") {
  run_ranks(4, [](int rank) {
    auto tower = make_tower();
    const auto expected = make_tower();
    tower->register_buffer("own", at::full({2}, rank + 1.0));
    tower->register_buffer("turned", at::full({2, 3}, rank + 1.0).t());
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : tower->parameters()) {
        parameter.add_(rank);
      }
    }
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"});
    wrap_module(*tower, {.sharding_strategy = Strategy::HYBRID_SHARD,
                         .auto_wrap_policy = block_policy(),
                         .sync_module_states = true,
                         .device_mesh = mesh});
    check_sharded_parity(expected, tower);
    expect_equal(tower->named_buffers()["own"].sum().item<float>(), 2.f);
    expect_equal(tower->named_buffers()["turned"].sum().item<float>(), 6.f);
  });
}

TEST_CASE("row 67: sync_module_states on top of tensor parallelism: the parts of the first replica win") {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    tessera::nn::Linear layer(4, 6);
    const at::NoGradGuard no_grad;
    layer->weight.copy_(at::arange(24).view({6, 4}) + (rank < 2 ? 0 : 100));
    parallelize_module(*layer, mesh["tp"], ColwiseParallel());
    wrap_module(*layer, {.sync_module_states = true, .device_mesh = mesh["dp"]});
    expect_bit_equal(full_tensor(layer->weight), at::arange(24, at::kFloat).view({6, 4}));
  });
}

TEST_CASE("rows 57, 71: containers without a forward and modules that are wrapped already are refused") {
  run_ranks(2, [](int) {
    torch::nn::ModuleList list;
    list->push_back(tessera::nn::Linear(2, 2));
    expect_throws<StateError>([&] { wrap_module(*list); },
                              "FullyShardedDataParallel: modules of type torch::nn::ModuleListImpl");
    // A policy that chooses such a one: nothing is wrapped.
    tessera::nn::Sequential chain;
    chain->push_back(tessera::nn::Linear(2, 2));
    chain->ptr(0)->register_module("list", list);
    expect_throws<StateError>([&] { wrap_module(*chain, {.auto_wrap_policy = always_wrap_policy()}); },
                              "FullyShardedDataParallel: modules of type torch::nn::ModuleListImpl");
    TESSERA_EXPECT(FSDP::fsdp_modules(*chain).empty());
    auto tower = make_tower();
    wrap_module(*tower->blocks[0]);
    expect_throws<ValueError>([&] { wrap_module(*tower, {.auto_wrap_policy = block_policy()}); },
                              "which is wrapped already");
    expect_throws<ValueError>([&] { wrap_module(*tower->blocks[0]); }, "the module is wrapped already");
  });
}

TEST_CASE("row 74: a parameter that is registered after wrapping is named") {
  run_ranks(2, [](int rank) {
    const FullyShardedDataParallel model(make_tower());
    check_replicas(*model);
    model.module().register_parameter("late", at::full({2}, static_cast<double>(rank)));
    expect_throws<StateError>([&] { check_replicas(*model); }, "late");
  });
}

TEST_CASE("row 76: a unit whose parameters belong to units below trains, clips and saves as the plain chain") {
  const auto chain_of = [](uint64_t seed) {
    tessera::nn::Sequential chain;
    chain->push_back(tessera::nn::Linear(5, 4));
    chain->push_back(tessera::nn::Linear(4, 3));
    fill_parameters(*chain, seed);
    return chain;
  };
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](int rank) {
      auto reference = chain_of(1);
      const FullyShardedDataParallel model(chain_of(1),
                                           {.auto_wrap_policy = module_wrap_policy<torch::nn::LinearImpl>()});
      TESSERA_EXPECT(!model.has_params());
      TESSERA_EXPECT(FSDP::fsdp_modules(*model)[1].has_params());
      TESSERA_EXPECT(!model.mixed_precision_enabled_for_buffers() && !model.low_precision_hook_enabled());
      for (const auto& parameter : model->parameters()) {
        TESSERA_EXPECT(is_dtensor(parameter));  // every one has a unit
      }
      torch::optim::Adam optimizer(model->parameters(), 1e-2), reference_optimizer(reference->parameters(), 1e-2);
      constexpr double kMaxNorm = 0.2;
      for (int step = 0; step < 3; ++step) {
        reference_optimizer.zero_grad();
        average_reference(*reference, ranks, [&](int r) { weighted_loss(reference(batch_of(r))).backward(); });
        optimizer.zero_grad();
        weighted_loss(model(batch_of(rank))).backward();
        check_sharded_parity(*reference, *model);
        const double expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), kMaxNorm);
        TESSERA_EXPECT(expected > kMaxNorm);
        TESSERA_EXPECT(std::abs(model.clip_grad_norm_(kMaxNorm).item<double>() - expected) < 1e-5 * expected);
        optimizer.step();
        reference_optimizer.step();
        check_sharded_parity(*reference, *model, {.tolerance = {.rtol = 1e-5, .atol = 1e-5}});
      }
      const auto initial = chain_of(1);
      TESSERA_EXPECT(
          (full_tensor(model->parameters()[0].detach()) - initial->parameters()[0]).abs().max().item<float>() > 1e-2);
      // What is saved of it is a plain chain's, and a plain chain's loads.
      auto saved = chain_of(2);
      FSDP::load_state_dict(*saved, FSDP::state_dict(*model));
      for (size_t i = 0; i < 4; ++i) {
        expect_bit_equal(saved->parameters()[i], full_tensor(model->parameters()[i].detach()));
      }
      FSDP::load_state_dict(*model, FSDP::state_dict(*chain_of(3)));
      check_sharded_parity(*chain_of(3), *model, {.gradients = false});
      model.unshard(/*async_op=*/true).wait();
      FSDP::summon_full_params(*model, {.recurse = false}, [&] { TESSERA_EXPECT(is_dtensor(model->parameters()[0])); });
      model.no_sync([&] { weighted_loss(model(batch_of(rank))).backward(); });
    });
  }
}

TEST_CASE("rows 75, 77: the wrapper gives the module, its members and its elements") {
  run_ranks(2, [](int) {
    tessera::nn::Sequential chain;
    const tessera::nn::Linear first(5, 4);
    chain->push_back(first);
    const FullyShardedDataParallel model(chain);
    TESSERA_EXPECT(&model.module() == chain.get());
    TESSERA_EXPECT(model[0].get() == first.get());
    TESSERA_EXPECT(model->size() == 1u);
    expect_equal(model->named_parameters().keys(), std::vector<std::string>{"0.weight", "0.bias"});
  });
}

TEST_CASE("rows 78, 79: roots: a child may be asked first; a plain parent has the roots below it") {
  run_ranks(2, [](int) {
    const FullyShardedDataParallel model(make_tower(), {.auto_wrap_policy = block_policy()});
    const auto units = FSDP::fsdp_modules(*model);
    TESSERA_EXPECT(units[1].check_is_root());
    expect_gradients_of_average(model);
    TESSERA_EXPECT(!units[1].check_is_root() && model.check_is_root());
    expect_equal(FSDP::fsdp_modules(*model, /*root_only=*/true).size(), 1u);

    tessera::nn::Sequential parent;
    parent->push_back(Block(4, 3));
    parent->push_back(Block(4, 3));
    wrap_module(*parent->ptr(0), {.auto_wrap_policy = module_wrap_policy<torch::nn::LinearImpl>()});
    wrap_module(*parent->ptr(1));
    expect_equal(FSDP::fsdp_modules(*parent).size(), 4u);
    const auto roots = FSDP::fsdp_modules(*parent, /*root_only=*/true);
    expect_equal(roots.size(), 2u);
    TESSERA_EXPECT(&roots[0].module() == parent->ptr(0).get() && &roots[1].module() == parent->ptr(1).get());
  });
}

}  // namespace tessera::testing
