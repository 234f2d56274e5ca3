// FullyShardedDataParallel: full parameters, state dicts, accumulation and clipping.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>

#include <cmath>
#include <limits>

#include "comm/comm_stats.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fsdp.h"
#include "nn/sequential.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/small_models.h"
#include "third_party/catch2/catch.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

using Model = FullyShardedDataParallel<Tower::Impl>;
using Strategy = ShardingStrategy;

Tower make_tower() {
  Tower tower(8, 6, 2);
  fill_parameters(*tower, 7);
  return tower;
}

Model make_model(FSDPOptions options = {}) {
  options.auto_wrap_policy = module_wrap_policy<BlockImpl>();
  return Model(make_tower(), std::move(options));
}

at::Tensor batch_of(int rank) {
  return make_batch(static_cast<uint64_t>(20 + rank), 3, 5);
}

void run_backward(const Model& model) {
  weighted_loss(model(batch_of(get_rank()))).backward();
}

/// Gradients of the plain model, averaged over the ranks.
Tower reference_after_backward() {
  auto reference = make_tower();
  average_reference(*reference, get_world_size(),
                    [&](int rank) { weighted_loss(reference(batch_of(rank))).backward(); });
  return reference;
}

void expect_values(const torch::nn::Module& actual, const torch::nn::Module& expected) {
  const auto wanted = expected.named_parameters();
  for (const auto& item : actual.named_parameters()) {
    TESSERA_EXPECT(!is_dtensor(item.value()));
    expect_bit_equal(item.value().detach(), wanted[item.key()].detach());
  }
}

const StateDictSettings kFull = StateDictSettings::make(StateDictType::FULL_STATE_DICT);
const StateDictSettings kSharded = StateDictSettings::make(StateDictType::SHARDED_STATE_DICT);
const StateDictSettings kLocal = StateDictSettings::make(StateDictType::LOCAL_STATE_DICT);

}  // namespace

TEST_CASE("rows 89, 96: summon_full_params shows full parameters under plain names, and gives the shards back") {
  for (const int world_size : {1, 2, 4}) {
    run_ranks(world_size, [](int) {
      const auto plain = make_tower();
      const auto model = make_model();
      const auto before = to_local(model->in->weight.detach()).clone();
      FSDP::summon_full_params(*model, {}, [&] {
        expect_values(*model, *plain);
        expect_equal(model->named_parameters().keys(), plain->named_parameters().keys());
        TESSERA_EXPECT(model.training_state() == TrainingState::SUMMON_FULL_PARAMS);
      });
      expect_bit_equal(to_local(model->in->weight.detach()), before);
      TESSERA_EXPECT(model.training_state() == TrainingState::IDLE);
      FSDP::summon_full_params(*model, {.recurse = false}, [&] {
        TESSERA_EXPECT(!is_dtensor(model->in->weight) && is_dtensor(model->blocks[0]->up->weight));
      });
      FSDP::summon_full_params(*model->blocks[1], {}, [&] {
        TESSERA_EXPECT(is_dtensor(model->in->weight) && !is_dtensor(model->blocks[1]->up->weight));
      });
      run_backward(model);
      check_sharded_parity(*reference_after_backward(), *model);
    });
  }
}

TEST_CASE("row 90: summon_full_params writes back this rank's rows, or not; what is not sharded stays changed") {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](int) {
      const at::NoGradGuard no_grad;
      for (const auto strategy : {Strategy::FULL_SHARD, Strategy::NO_SHARD}) {
        const auto model = make_model({.sharding_strategy = strategy});
        const auto sum = [&] { return full_tensor(model->in->weight.detach()).sum().item<float>(); };
        FSDP::summon_full_params(*model, {}, [&] { model->in->weight.fill_(2); });
        expect_equal(sum(), 80.f);
        FSDP::summon_full_params(*model, {.writeback = false}, [&] { model->in->weight.fill_(3); });
        const bool is_whole = world_size == 1 || strategy == Strategy::NO_SHARD;
        expect_equal(sum(), is_whole ? 120.f : 80.f);
      }
    });
  }
}

TEST_CASE("rows 91, 116: summon_full_params for rank 0 alone; with write-back it is refused") {
  run_ranks(2, [](int rank) {
    const auto model = make_model();
    FSDP::summon_full_params(*model, {.writeback = false, .rank0_only = true}, [&] {
      for (const auto& parameter : model->parameters()) {
        expect_equal(is_dtensor(parameter), rank != 0);
      }
    });
    expect_throws<NotImplementedError>([&] { FSDP::summon_full_params(*model, {.rank0_only = true}, [] {}); },
                                       "rank0_only with writeback");
  });
}

TEST_CASE("rows 92, 116: summon_full_params on the CPU; refused where nothing is sharded") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    FSDP::summon_full_params(*model, {.offload_to_cpu = true},
                             [&] { TESSERA_EXPECT(model->in->weight.device().is_cpu()); });
    const auto whole = make_model({.sharding_strategy = Strategy::NO_SHARD});
    expect_throws<NotImplementedError>([&] { FSDP::summon_full_params(*whole, {.offload_to_cpu = true}, [] {}); },
                                       "is not sharded (NO_SHARD)");
  });
}

TEST_CASE("rows 93, 116: summon_full_params with gradients in the full shape") {
  run_ranks(2, [](int) {
    const auto reference = reference_after_backward();
    const auto model = make_model();
    run_backward(model);
    FSDP::summon_full_params(*model, {.with_grads = true}, [&] {
      const auto expected = reference->named_parameters();
      for (const auto& item : model->named_parameters()) {
        expect_close(item.value().grad(), expected[item.key()].grad());
      }
      const at::NoGradGuard no_grad;
      model->in->bias.mutable_grad().fill_(5);
    });
    expect_equal(full_tensor(model->in->bias.grad()).sum().item<float>(), 40.f);
    FSDP::summon_full_params(*model, {}, [&] { TESSERA_EXPECT(!model->in->bias.grad().defined()); });
    TESSERA_EXPECT(is_dtensor(model->in->bias.grad()));
    expect_throws<NotImplementedError>(
        [&] { FSDP::summon_full_params(*model, {.offload_to_cpu = true, .with_grads = true}, [] {}); },
        "with_grads with offload_to_cpu");
  });
}

TEST_CASE("rows 94, 113, 116: no scope inside of a scope, of forward or of backward, and no forward inside of one") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    const auto summon = [&] { FSDP::summon_full_params(*model, {}, [] {}); };
    FSDP::summon_full_params(*model, {}, [&] {
      expect_throws<StateError>(summon, "is in the state SUMMON_FULL_PARAMS");
      expect_throws<StateError>([&] { model(batch_of(0)); }, "inside of summon_full_params");
      expect_throws<ValueError>([&] { model.apply([](torch::nn::Module&) {}); }, "apply");
      expect_throws<ValueError>([&] { model.clip_grad_norm_(1); }, "clip_grad_norm_");
      expect_throws<ValueError>([&] { model.no_sync([] {}); }, "allowed: IDLE");
    });
    int tries = 0;
    auto handle = find_hook_point(*model->blocks[0])->register_forward_pre_hook([&](HookPoint&, TensorRefs) {
      ++tries;
      expect_throws<StateError>(summon, "is in the state FORWARD_BACKWARD");
    });
    auto out = model(batch_of(get_rank()));
    handle.remove();
    out.register_hook([&](const at::Tensor&) {
      ++tries;
      expect_throws<StateError>(summon, "summon_full_params");
    });
    weighted_loss(out).backward();
    expect_equal(tries, 2);
    summon();
    TESSERA_EXPECT(model.training_state() == TrainingState::IDLE);
    expect_throws<Error>([&] { FSDP::summon_full_params(*model, {}, [] { throw Error("from inside"); }); },
                         "from inside");
    TESSERA_EXPECT(is_dtensor(model->in->weight) && model.training_state() == TrainingState::IDLE);
    run_backward(model);
  });
}

TEST_CASE("rows 97, 116: assert_state names the state and those that are allowed") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    model.assert_state({TrainingState::IDLE});
    expect_throws<ValueError>(
        [&] {
          model.assert_state({TrainingState::FORWARD_BACKWARD, TrainingState::SUMMON_FULL_PARAMS});
        },
        "in the state IDLE, allowed: FORWARD_BACKWARD, SUMMON_FULL_PARAMS");
  });
}

TEST_CASE("row 80: apply sees full parameters, its edits stay, and the model may become part of a larger one") {
  run_ranks(2, [](int) {
    auto tower = make_tower();
    Model model(tower, {.auto_wrap_policy = module_wrap_policy<BlockImpl>()});
    int calls = 0;
    model.apply([&](torch::nn::Module& module) {
      ++calls;
      const at::NoGradGuard no_grad;
      for (auto& parameter : module.parameters(/*recurse=*/false)) {
        TESSERA_EXPECT(!is_dtensor(parameter));
        parameter.fill_(0.5);
      }
    });
    expect_equal(calls, 10);
    expect_equal(full_tensor(tower->blocks[0]->down->weight.detach()).sum().item<float>(), 24.f);
    tessera::nn::Sequential larger;
    larger->push_back(tower);
    const FullyShardedDataParallel outer(larger);
    weighted_loss(outer(batch_of(get_rank()))).backward();
    TESSERA_EXPECT(outer.check_is_root() && !model.check_is_root());
  });
}

TEST_CASE("row 98: no_sync sends no gradients; k micro-batches are one batch; scopes nest and restore") {
  run_ranks(2, [](int) {
    auto reference = make_tower();
    average_reference(*reference, 2, [&](int rank) {
      for (int i = 0; i < 3; ++i) {
        weighted_loss(reference(make_batch(static_cast<uint64_t>(10 * i + rank), 3, 5))).backward();
      }
    });
    const auto model = make_model();
    const auto micro_batch = [&](int i) {
      weighted_loss(model(make_batch(static_cast<uint64_t>(10 * i + get_rank()), 3, 5))).backward();
    };
    reset_comm_stats();
    model.no_sync([&] {
      micro_batch(0);
      model.no_sync([&] { micro_batch(1); });
    });
    expect_equal(comm_stats()[Collective::ReduceScatter].calls, 0);
    micro_batch(2);
    expect_equal(comm_stats()[Collective::ReduceScatter].calls, 3);
    check_sharded_parity(*reference, *model);
    expect_throws<Error>([&] { model.no_sync([] { throw Error("from inside"); }); }, "from inside");
    model->zero_grad();
    run_backward(model);
    check_sharded_parity(*reference_after_backward(), *model);
  });
}

TEST_CASE("rows 98, 116: no_sync is for the root, and for those who leave its setting alone") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    run_backward(model);
    const auto child = FSDP::fsdp_modules(*model)[1];
    expect_throws<StateError>([&] { child.no_sync([] {}); }, "is a unit of a larger model");
    expect_throws<StateError>([&] { model.no_sync([&] { fsdp(*model).set_requires_gradient_sync(true); }); },
                              "was switched on inside");
  });
}

TEST_CASE("row 100: clip_grad_norm_ clips as on the plain model, with an ignored parameter and replicas") {
  for (const int world_size : {1, 2, 4}) {
    run_ranks(world_size, [](int) {
      for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
        for (const auto strategy : {Strategy::FULL_SHARD, Strategy::HYBRID_SHARD}) {
          const auto reference = reference_after_backward();
          const auto model = make_model({.sharding_strategy = strategy});
          run_backward(model);
          const auto expected = clip_grad_norm_(reference->parameters(), 0.01, {.norm_type = p});
          expect_close(model.clip_grad_norm_(0.01, p), expected);
          check_sharded_parity(*reference, *model);
        }
      }
      auto tower = make_tower();
      Model model(tower, {.ignored_states = {tower->out->bias}});
      weighted_loss(model(batch_of(0))).backward();
      auto plain = make_tower();
      weighted_loss(plain(batch_of(0))).backward();
      expect_close(model.clip_grad_norm_(0.01), clip_grad_norm_(plain->parameters(), 0.01));
      expect_close(tower->out->bias.grad(), plain->out->bias.grad());
    });
  }
}

TEST_CASE("rows 101, 103, 116: clip_grad_norm_: factor 1 below the limit; no gradients are a norm of 0; root only") {
  run_ranks(4, [](int) {
    const auto model = make_model();
    TESSERA_EXPECT(model.clip_grad_norm_(1.0).scalar_type() == at::kFloat);
    expect_equal(model.clip_grad_norm_(1.0).item<float>(), 0.f);
    run_backward(model);
    const auto before = to_local(model->in->weight.grad()).clone();
    const auto norm = model.clip_grad_norm_(1e6);
    expect_bit_equal(to_local(model->in->weight.grad()), before);
    // A second call finds the same: nothing was cached that the first one changed.
    expect_bit_equal(model.clip_grad_norm_(1e6), norm);
    const auto infinity = std::numeric_limits<double>::infinity();
    const auto largest = model.clip_grad_norm_(1e6, infinity);
    expect_bit_equal(model.clip_grad_norm_(1e6, infinity), largest);
    expect_throws<StateError>([&] { FSDP::fsdp_modules(*model)[1].clip_grad_norm_(1.0); }, "is a unit of a larger");
    expect_throws<ValueError>([&] { model.clip_grad_norm_(1.0, 0.0); }, "norm_type");
  });
}

TEST_CASE("rows 102, 104: clip_grad_norm_: no traffic where nothing is sharded; gradients of several dtypes") {
  run_ranks(2, [](int) {
    const auto model = make_model({.sharding_strategy = Strategy::NO_SHARD});
    run_backward(model);
    reset_comm_stats();
    const auto norm = model.clip_grad_norm_(0.01);
    expect_equal(comm_stats().calls(), 0);
    expect_close(norm, clip_grad_norm_(reference_after_backward()->parameters(), 0.01));

    tessera::nn::Sequential chain;
    chain->push_back(tessera::nn::Linear(5, 4));
    chain->push_back(tessera::nn::Linear(4, 3));
    fill_parameters(*chain, 3);
    chain->ptr(1)->to(at::kBFloat16);
    wrap_module(*chain->ptr(0));
    wrap_module(*chain->ptr(1));
    const FullyShardedDataParallel mixed(chain);
    auto& second = chain->at<torch::nn::LinearImpl>(1);
    chain->at<torch::nn::LinearImpl>(0).weight.mutable_grad() =
        at::ones_like(chain->at<torch::nn::LinearImpl>(0).weight.detach());
    second.weight.mutable_grad() = at::ones_like(second.weight.detach());
    const auto total = mixed.clip_grad_norm_(100.0);
    TESSERA_EXPECT(total.scalar_type() == at::kFloat);
    expect_close(total, at::full({}, std::sqrt(32.0), at::kFloat));
  });
}

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

TEST_CASE("row 88: forward: unshard, compute, reshard, and the first unit belongs to the root") {
  run_ranks(2, [](int) {
    const auto model = make_model({.forward_prefetch = true});
    run_backward(model);
    std::vector<std::string> events;
    fsdp(*model).set_event_observer([&](const UnitEvent& event) { events.push_back(to_string(event)); });
    const at::NoGradGuard no_grad;
    model(batch_of(get_rank()));
    expect_equal(events,
                 std::vector<std::string>{"gather root", "unshard root", "gather block0", "forward root",
                                          "unshard block0", "gather block1", "forward block0", "reshard block0",
                                          "unshard block1", "forward block1", "reshard block1", "reshard root"});
  });
}

TEST_CASE("row 112: a unit that was unsharded by hand is not gathered again by its forward") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    run_backward(model);
    reset_comm_stats();
    auto handle = model.unshard(/*async_op=*/true);
    handle.wait();
    handle.wait();
    TESSERA_EXPECT(!is_dtensor(model->in->weight));
    expect_equal(comm_stats()[Collective::AllGather].calls, 1);
    const at::NoGradGuard no_grad;
    model(batch_of(get_rank()));
    expect_equal(comm_stats()[Collective::AllGather].calls, 3);
  });
}
