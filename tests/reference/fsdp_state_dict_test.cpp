// FullyShardedDataParallel: the types of state dicts.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>

#include "dtensor/dtensor.h"
#include "nn/hooks/clone.h"
#include "nn/linear.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

const StateDictSettings kFull = StateDictSettings::make(StateDictType::FULL_STATE_DICT);
const StateDictSettings kSharded = StateDictSettings::make(StateDictType::SHARDED_STATE_DICT);
const StateDictSettings kLocal = StateDictSettings::make(StateDictType::LOCAL_STATE_DICT);

}  // namespace

TEST_CASE("rows 81, 116: set_state_dict_type: defaults, the former settings, and configs of another type") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    expect_equal(kFull.state_dict_config == StateDictConfig(FullStateDictConfig{}), true);
    TESSERA_EXPECT(std::get<FullOptimStateDictConfig>(kFull.optim_state_dict_config).offload_to_cpu);
    TESSERA_EXPECT(!std::get<LocalOptimStateDictConfig>(kLocal.optim_state_dict_config).offload_to_cpu);
    TESSERA_EXPECT(FSDP::set_state_dict_type(*model, kSharded) == kFull);
    TESSERA_EXPECT(FSDP::set_state_dict_type(*model, kLocal) == kSharded);
    tessera::nn::Linear plain(2, 2);
    TESSERA_EXPECT(!FSDP::set_state_dict_type(*plain, kLocal) && !FSDP::get_state_dict_type(*plain));
    expect_throws<StateError>([] { StateDictSettings::make(StateDictType::FULL_STATE_DICT, LocalStateDictConfig{}); },
                              "FULL_STATE_DICT takes a FullStateDictConfig, but a LocalStateDictConfig is given");
    expect_throws<StateError>(
        [] { StateDictSettings::make(StateDictType::SHARDED_STATE_DICT, {}, FullOptimStateDictConfig{}); },
        "takes a ShardedOptimStateDictConfig, but a FullOptimStateDictConfig is given");
    const StateDictSettings wrong{StateDictType::FULL_STATE_DICT, ShardedStateDictConfig{}};
    expect_throws<StateError>([&] { FSDP::set_state_dict_type(*model, wrong); }, "takes a FullStateDictConfig");
    TESSERA_EXPECT(FSDP::get_state_dict_type(*model) == kLocal);
  });
}

TEST_CASE("rows 82, 83, 116: units that differ are refused and stay as they are; the scope restores") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    FSDP::set_state_dict_type(*model->blocks[1], kSharded);
    expect_throws<StateError>([&] { FSDP::get_state_dict_type(*model); }, "the units differ");
    expect_throws<StateError>([&] { FSDP::set_state_dict_type(*model, kLocal); }, "'block1' has SHARDED_STATE_DICT");
    TESSERA_EXPECT(FSDP::get_state_dict_type(*model->blocks[1]) == kSharded);
    TESSERA_EXPECT(FSDP::get_state_dict_type(*model->blocks[0]) == kFull);
    FSDP::set_state_dict_type(*model->blocks[1], kFull);
    FSDP::state_dict_type(*model, kSharded, [&] { TESSERA_EXPECT(FSDP::get_state_dict_type(*model) == kSharded); });
    TESSERA_EXPECT(FSDP::get_state_dict_type(*model) == kFull);
    expect_throws<Error>([&] { FSDP::state_dict_type(*model, kSharded, [] { throw Error("from inside"); }); },
                         "from inside");
    TESSERA_EXPECT(FSDP::get_state_dict_type(*model) == kFull);
    tessera::nn::Linear plain(2, 2);
    bool ran = false;
    FSDP::state_dict_type(*plain, kSharded, [&] { ran = true; });
    TESSERA_EXPECT(ran);
  });
}

TEST_CASE("rows 83, 113: a scope that throws restores the type and both configs, for state dicts and optimizers'") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    const auto before = StateDictSettings::make(StateDictType::FULL_STATE_DICT,
                                                FullStateDictConfig{.offload_to_cpu = true, .rank0_only = true},
                                                FullOptimStateDictConfig{.offload_to_cpu = false, .rank0_only = true});
    const auto inside = StateDictSettings::make(StateDictType::FULL_STATE_DICT);
    FSDP::set_state_dict_type(*model, before);
    for (const auto& settings : {kSharded, kLocal, inside}) {
      TESSERA_EXPECT(settings.state_dict_config != before.state_dict_config);
      TESSERA_EXPECT(settings.optim_state_dict_config != before.optim_state_dict_config);
      expect_throws<Error>(
          [&] {
            FSDP::state_dict_type(*model, settings, [&] {
              for (const auto& unit : FSDP::fsdp_modules(*model)) {
                TESSERA_EXPECT(FSDP::get_state_dict_type(unit.module()) == settings);
              }
              throw Error("from inside");
            });
          },
          "from inside");
      for (const auto& unit : FSDP::fsdp_modules(*model)) {
        const auto after = FSDP::get_state_dict_type(unit.module()).value();
        TESSERA_EXPECT(after.type == before.type);
        TESSERA_EXPECT(after.state_dict_config == before.state_dict_config);
        TESSERA_EXPECT(after.optim_state_dict_config == before.optim_state_dict_config);
      }
    }
  });
}

TEST_CASE("row 84: full state dict: plain names and shapes, copies, rank 0 only, and it loads into a plain model") {
  run_ranks(2, [](int rank) {
    const auto plain = make_tower();
    const auto model = make_model();
    const auto state = FSDP::state_dict(*model);
    expect_equal(state.keys(), plain->named_parameters().keys());
    for (const auto& item : state) {
      TESSERA_EXPECT(!is_dtensor(item.value()));
      expect_bit_equal(item.value(), plain->named_parameters()[item.key()].detach());
    }
    {
      const at::NoGradGuard no_grad;
      state["in.weight"].zero_();
    }
    expect_bit_equal(full_tensor(model->in->weight.detach()), plain->in->weight.detach());
    FSDP::load_state_dict(*model, state);
    expect_equal(full_tensor(model->in->weight.detach()).abs().sum().item<float>(), 0.f);
    auto other = make_tower();
    FSDP::load_state_dict(*other, state);
    expect_equal(other->in->weight.abs().sum().item<float>(), 0.f);
    FSDP::set_state_dict_type(*model,
                              StateDictSettings::make(StateDictType::FULL_STATE_DICT, FullStateDictConfig{true, true}));
    expect_equal(FSDP::state_dict(*model).size(), rank == 0 ? state.size() : 0u);
    auto missing = FSDPStateDict();
    missing.insert("in.weigth", at::ones({1}));
    expect_throws<KeyError>([&] { FSDP::load_state_dict(*model, missing); }, "unknown in.weigth");
    expect_throws<KeyError>([&] { FSDP::load_state_dict(*model, missing); }, "missing in.weight");
  });
}

TEST_CASE("row 84: a full state dict has a tied parameter under both names, and copies on the CPU") {
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [](int) {
      auto tower = make_tower();
      tie_parameter(*tower->blocks[1]->up, "weight", tower->blocks[0]->up->weight);
      const FullyShardedDataParallel model(tower);
      FSDP::set_state_dict_type(
          *model, StateDictSettings::make(StateDictType::FULL_STATE_DICT, FullStateDictConfig{.offload_to_cpu = true}));
      const auto state = FSDP::state_dict(*model);
      expect_equal(state.size(), 14u);
      expect_bit_equal(state["block0.up.weight"], make_tower()->blocks[0]->up->weight.detach());
      expect_bit_equal(state["block1.up.weight"], state["block0.up.weight"]);
      for (const auto& item : state) {
        TESSERA_EXPECT(item.value().is_cpu() && !is_dtensor(item.value()));
      }
    });
  }
}

TEST_CASE("rows 85, 87: sharded state dict: DTensors; four ranks' shards make the model of two ranks") {
  std::vector<FSDPStateDict> saved(4);
  run_ranks(4, [&](int rank) {
    const auto model = make_model();
    FSDP::set_state_dict_type(*model, kSharded);
    for (const auto& item : FSDP::state_dict(*model)) {
      TESSERA_EXPECT(is_dtensor(item.value()));
      expect_equal(placements(item.value()), Placements{Shard(0)});
      saved[static_cast<size_t>(rank)].insert(item.key(), to_local(item.value()).clone());
    }
    const auto own = FSDP::state_dict(*model);
    const auto other = make_model();
    const at::NoGradGuard no_grad;
    for (auto& parameter : other->parameters()) {
      parameter.zero_();
    }
    FSDP::load_state_dict(*other, own);
    check_sharded_parity(*make_tower(), *other);
  });
  run_ranks(2, [&](int) {
    const auto model = make_model();
    const at::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) {
      parameter.zero_();
    }
    FSDPStateDict joined;
    for (const auto& item : saved[0]) {
      std::vector<at::Tensor> parts;
      for (const auto& rank : saved) {
        parts.push_back(rank[item.key()]);
      }
      joined.insert(item.key(), at::cat(parts));
    }
    FSDP::load_state_dict(*model, joined);
    check_sharded_parity(*make_tower(), *model);
  });
}

TEST_CASE("rows 86, 116: local state dict: this rank's rows, flat; not over a mesh; whole where nothing is sharded") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    FSDP::set_state_dict_type(*model, kLocal);
    FSDPStateDict state;
    for (const auto& item : FSDP::state_dict(*model)) {
      expect_equal(item.value().dim(), 1);
      const auto local = to_local(model->named_parameters()[item.key()].detach());
      expect_equal(item.value().numel(), local.numel());
      state.insert(item.key(), item.value().clone());
    }
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) {
        parameter.zero_();
      }
    }
    FSDP::load_state_dict(*model, state);
    check_sharded_parity(*make_tower(), *model);
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto on_mesh = make_model({.device_mesh = mesh});
    FSDP::set_state_dict_type(*on_mesh, kLocal);
    expect_throws<StateError>([&] { FSDP::state_dict(*on_mesh); }, "LOCAL_STATE_DICT is not defined");
    const auto whole = make_model({.sharding_strategy = Strategy::NO_SHARD});
    FSDP::set_state_dict_type(*whole, kLocal);
    const auto full = FSDP::state_dict(*whole);
    TESSERA_EXPECT(!is_dtensor(full["in.weight"]) && full["in.weight"].dim() == 2);
  });
}

TEST_CASE("rows 86, 116: a state that does not fit on one rank is an error on all, and nothing is loaded") {
  run_ranks(2, [](int rank) {
    const auto model = make_model();
    FSDP::set_state_dict_type(*model, kLocal);
    FSDPStateDict state;
    for (const auto& item : FSDP::state_dict(*model)) {
      const bool is_last = item.key() == "out.bias";
      state.insert(item.key(), is_last && rank == 1 ? at::zeros({7, 7}) : at::zeros_like(item.value()));
    }
    expect_throws<ValueError>(
        [&] { FSDP::load_state_dict(*model, state); },
        rank == 1 ? "load_state_dict: 'out.bias' is [7, 7]" : "rank 1 cannot: load_state_dict: '");
    check_sharded_parity(*make_tower(), *model);
  });
}

TEST_CASE("parameters that a forward without backward, or unshard(), left unsharded are saved and loaded as shards") {
  const auto settings = GENERATE(kFull, kSharded, kLocal);
  const bool by_forward = GENERATE(true, false);
  run_ranks(2, [&](int rank) {
    const auto model = make_model({.mixed_precision = {.param_dtype = at::kBFloat16}});
    FSDP::set_state_dict_type(*model, settings);
    const auto unshard = [&] {
      if (by_forward) {
        model(batch_of(rank));
      } else {
        model.unshard();
      }
      TESSERA_EXPECT(!is_dtensor(model->in->weight));
    };
    FSDPStateDict expected, zeros;
    for (const auto& item : FSDP::state_dict(*model)) {
      expected.insert(item.key(), item.value().clone());
      zeros.insert(item.key(), at::zeros_like(item.value()));
    }
    unshard();
    for (const auto& item : FSDP::state_dict(*model)) {
      const auto& value = expected[item.key()];
      expect_equal(is_dtensor(item.value()), is_dtensor(value));
      expect_bit_equal(is_dtensor(value) ? to_local(item.value()) : item.value(),
                       is_dtensor(value) ? to_local(value) : value);
    }
    unshard();
    FSDP::load_state_dict(*model, zeros);
    for (const auto& param : model->parameters()) {
      expect_equal(to_local(param.detach()).abs().sum().item<float>(), 0.f);
    }
  });
}

TEST_CASE("a state dict inside of a forward is refused, and one inside of summon_full_params is full") {
  run_ranks(2, [](int rank) {
    const auto model = make_model();
    FSDP::set_state_dict_type(*model, kLocal);
    FSDP::summon_full_params(*model, {}, [&] { expect_equal(FSDP::state_dict(*model)["in.weight"].dim(), 2); });
    auto handle = hook_point(*model->blocks[1], "test").register_forward_hook([&](HookPoint&, TensorRefs) {
      FSDP::state_dict(*model);
    });
    expect_throws<StateError>([&] { model(batch_of(rank)); }, "the unit 'root' computes");
    handle.remove();
    expect_gradients_of_average(model);
  });
}

TEST_CASE("a full state dict that one rank takes inside of a forward is an error on all") {
  run_ranks(2, [](int rank) {
    const auto model = make_model();
    const auto take = [&] { FSDP::state_dict(*model); };
    if (rank == 0) {
      auto handle =
          hook_point(*model->blocks[1], "test").register_forward_hook([&](HookPoint&, TensorRefs) { take(); });
      expect_throws<StateError>([&] { model(batch_of(rank)); }, "the unit 'root' computes");
      handle.remove();
    } else {
      model(batch_of(rank));
      expect_throws<StateError>(take, "rank 0");
    }
  });
}

TEST_CASE("a state that one rank loads inside of a forward is an error on all") {
  run_ranks(2, [](int rank) {
    const auto model = make_model();
    FSDP::set_state_dict_type(*model, kLocal);
    const auto state = FSDP::state_dict(*model);
    const auto load = [&] { FSDP::load_state_dict(*model, state); };
    if (rank == 0) {
      auto handle =
          hook_point(*model->blocks[1], "test").register_forward_hook([&](HookPoint&, TensorRefs) { load(); });
      expect_throws<StateError>([&] { model(batch_of(rank)); }, "the unit 'root' computes");
      handle.remove();
    } else {
      model(batch_of(rank));
      expect_throws<ValueError>(load, "rank 0 cannot: ");
    }
  });
}

}  // namespace tessera::testing
