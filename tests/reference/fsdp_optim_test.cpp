// Optimizer state over wrapped models: saved, loaded into another number of ranks, and under other keys.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>

#include "comm/context/comm_stats.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/dtensor.h"
#include "fsdp1/fsdp_optim_state.h"
#include "fsdp1/param_names.h"
#include "nn/hooks/clone.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using Name = OptimStateDict::Key;

/// All ranks have the same data, so that the number of ranks does not matter.
template <class M, class O>
void train(M& model, O& optimizer, int first, int last) {
  for (int step = first; step < last; ++step) {
    optimizer.zero_grad();
    weighted_loss(model(make_batch(static_cast<uint64_t>(step), 3, 5))).backward();
    optimizer.step();
  }
}

void set_form(const TowerModel& model, StateDictType type, std::optional<OptimStateDictConfig> config = std::nullopt) {
  FSDP::set_state_dict_type(*model, StateDictSettings::make(type, std::nullopt, config));
}

template <class Optimizer, class Options>
void check_resume(const Options& options) {
  auto reference = make_tower();
  Optimizer reference_optimizer(reference->parameters(), options);
  train(reference, reference_optimizer, 0, 2);
  OptimStateDict saved;
  FSDPStateDict weights;
  run_ranks(4, [&](int rank) {
    auto model = make_model();
    Optimizer optimizer(model->parameters(), options);
    train(model, optimizer, 0, 2);
    const auto state = optim_state_dict(*model, optimizer);
    auto dict = FSDP::state_dict(*model);
    if (rank == 0) {
      saved = state;
      weights = dict;
    }
  });
  train(reference, reference_optimizer, 2, 4);
  run_ranks(2, [&](int) {
    auto model = make_model();
    FSDP::load_state_dict(*model, weights);
    Optimizer optimizer(model->parameters(), Options(options).lr(77));
    const auto loaded = optim_state_dict_to_load(*model, optimizer, saved, {.load_directly = true});
    expect_equal(loaded.state.begin()->first == Name(int64_t{0}), true);
    train(model, optimizer, 2, 4);
    check_sharded_parity(*reference, *model, {.tolerance = {.rtol = 1e-5, .atol = 1e-5}});
  });
}

}  // namespace

TEST_CASE("rows 105, 106: training resumes on two ranks from the optimizer state of four, as if never interrupted") {
  check_resume<torch::optim::Adam>(torch::optim::AdamOptions(1e-2));
  check_resume<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).amsgrad(true));
  check_resume<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9));
  check_resume<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3).momentum(0.9).centered(true));
  check_resume<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2));
}

TEST_CASE("row 105: full optimizer state is that of the plain model, under names; rank 0 only if asked") {
  run_ranks(2, [](int rank) {
    auto plain = make_tower();
    torch::optim::Adam plain_optimizer(plain->parameters(), 1e-2);
    train(plain, plain_optimizer, 0, 2);
    const auto expected = optim_state_dict(*plain, plain_optimizer);
    auto model = make_model();
    torch::optim::Adam optimizer(model->parameters(), 1e-2);
    train(model, optimizer, 0, 2);
    const auto full = optim_state_dict(*model, optimizer);
    expect_equal(full.state.size(), 14u);
    TESSERA_EXPECT(full.param_groups == expected.param_groups);
    expect_equal(full.param_groups[0].options.at("lr"), 1e-2);
    for (const auto& [name, entry] : expected.state) {
      for (const auto& [field, tensor] : entry) {
        const auto& own = full.state.at(name).at(field);
        TESSERA_EXPECT(!is_dtensor(own));
        expect_close(own, tensor);
      }
    }
    expect_equal(full.state.at(Name("in.weight")).at("step").item<int64_t>(), 2);
    set_form(model, StateDictType::FULL_STATE_DICT, FullOptimStateDictConfig{.rank0_only = true});
    expect_equal(optim_state_dict(*model, optimizer).state.size(), rank == 0 ? 14u : 0u);
    expect_equal(optim_state_dict(*model, optimizer).param_groups.size(), rank == 0 ? 1u : 0u);
    set_form(model, StateDictType::SHARDED_STATE_DICT);
    const auto sharded = optim_state_dict(*model, optimizer);
    const auto& moment = sharded.state.at(Name("in.weight")).at("exp_avg");
    TESSERA_EXPECT(is_dtensor(moment));
    expect_close(full_tensor(moment), full.state.at(Name("in.weight")).at("exp_avg"));
    optim_state_dict_to_load(*model, optimizer, sharded, {.load_directly = true});
    train(model, optimizer, 2, 3);
    train(plain, plain_optimizer, 2, 3);
    check_sharded_parity(*plain, *model);
  });
}

TEST_CASE("sharded optimizer state is a copy, to which a program can go back") {
  run_ranks(2, [](int) {
    auto model = make_model();
    torch::optim::Adam optimizer(model->parameters(), 1e-2);
    train(model, optimizer, 0, 2);
    set_form(model, StateDictType::SHARDED_STATE_DICT);
    const auto saved = optim_state_dict(*model, optimizer);
    set_form(model, StateDictType::FULL_STATE_DICT);
    const auto expected = optim_state_dict(*model, optimizer);
    train(model, optimizer, 2, 4);
    optim_state_dict_to_load(*model, optimizer, saved, {.load_directly = true});
    for (const auto& [name, entry] : optim_state_dict(*model, optimizer).state) {
      for (const auto& [field, tensor] : entry) {
        expect_bit_equal(tensor, expected.state.at(name).at(field));
      }
    }
  });
}

TEST_CASE("what Adagrad begins with is there for parameters without an entry") {
  run_ranks(2, [](int) {
    auto model = make_model();
    torch::optim::Adagrad optimizer(model->parameters(), torch::optim::AdagradOptions().initial_accumulator_value(0.5));
    auto saved = optim_state_dict(*model, optimizer);
    saved.state.erase(Name("in.weight"));
    train(model, optimizer, 0, 1);
    optim_state_dict_to_load(*model, optimizer, saved, {.load_directly = true});
    const auto loaded = optim_state_dict(*model, optimizer);
    expect_equal(loaded.state.size(), 14u);
    const auto& sum = loaded.state.at(Name("in.weight")).at("sum");
    expect_bit_equal(sum, at::full_like(sum, 0.5));
    train(model, optimizer, 1, 2);
  });
}

TEST_CASE("row 106: loading sends nothing for full entries, and returns names for a named optimizer") {
  run_ranks(2, [](int) {
    auto plain = make_tower();
    torch::optim::Adam plain_optimizer(plain->parameters(), 1e-2);
    train(plain, plain_optimizer, 0, 2);
    const auto saved = optim_state_dict(*plain, plain_optimizer);
    auto model = make_model();
    torch::optim::Adam optimizer(model->parameters(), 1e-2);
    reset_comm_stats();
    const auto named = optim_state_dict_to_load(*model, optimizer, saved, {.is_named_optimizer = true});
    expect_equal(comm_stats().calls(), 0);
    expect_equal(optimizer.state().size(), 0u);
    TESSERA_EXPECT(named.param_groups == saved.param_groups);
    const auto& moment = named.state.at(Name("in.weight")).at("exp_avg");
    TESSERA_EXPECT(placements(moment) == placements(model->in->weight));
    expect_close(full_tensor(moment), saved.state.at(Name("in.weight")).at("exp_avg"));
  });
}

TEST_CASE("row 109: keys are names or ids, in both directions, and a plain model steps on with them") {
  run_ranks(2, [](int) {
    auto model = make_model();
    torch::optim::Adam optimizer(model->parameters(), 1e-2);
    train(model, optimizer, 0, 2);
    const auto by_name = optim_state_dict(*model, optimizer);
    const auto by_id = rekey_optim_state_dict(by_name, OptimStateKeyType::PARAM_ID, *model, optimizer);
    TESSERA_EXPECT(by_id.param_groups[0].params[1] == Name(int64_t{1}));
    TESSERA_EXPECT(by_name.param_groups[0].params[1] == Name("in.bias"));
    TESSERA_EXPECT(
        by_id.state.at(Name(int64_t{1})).at("exp_avg").is_same(by_name.state.at(Name("in.bias")).at("exp_avg")));
    const auto back = rekey_optim_state_dict(by_id, OptimStateKeyType::PARAM_NAME, *model, optimizer);
    TESSERA_EXPECT(back.param_groups == by_name.param_groups && back.state.size() == by_name.state.size());
    const auto same = rekey_optim_state_dict(by_name, OptimStateKeyType::PARAM_NAME, *model, optimizer);
    TESSERA_EXPECT(same.param_groups == by_name.param_groups);

    auto plain = make_tower();
    const auto weights = FSDP::state_dict(*model);
    FSDP::load_state_dict(*plain, weights);
    torch::optim::Adam plain_optimizer(plain->parameters(), 0.5);
    optim_state_dict_to_load(*plain, plain_optimizer, by_id, {.load_directly = true});
    train(plain, plain_optimizer, 2, 3);
    train(model, optimizer, 2, 3);
    check_sharded_parity(*plain, *model);

    // An optimizer of one parameter: the others' names are dropped.
    torch::optim::Adam one({model->out->bias}, 1e-2);
    const auto dropped = rekey_optim_state_dict(by_name, OptimStateKeyType::PARAM_ID, *model, one);
    expect_equal(dropped.state.size(), 1u);
  });
}

TEST_CASE("rows 110, 116: optimizer dicts that do not fit are refused") {
  run_ranks(2, [](int) {
    auto model = make_model();
    torch::optim::Adam optimizer(model->parameters(), 1e-2);
    train(model, optimizer, 0, 1);
    const auto saved = optim_state_dict(*model, optimizer);
    const auto load = [&](const OptimStateDict& dict) { optim_state_dict_to_load(*model, optimizer, dict); };
    auto mixed = saved;
    mixed.state[Name(int64_t{0})] = {};
    expect_throws<ValueError>([&] { load(mixed); }, "keys are names and ids");
    auto groups = saved;
    groups.param_groups.pop_back();
    expect_throws<ValueError>([&] { load(groups); }, "differ in number or sizes");
    auto sizes = saved;
    sizes.state.at(Name("in.weight")).at("exp_avg") = at::ones({3});
    expect_throws<ValueError>([&] { load(sizes); }, "the state of 'in.weight' is [3]");
    auto unknown = saved;
    unknown.state[Name("inn.weight")] = {};
    expect_throws<KeyError>([&] { load(unknown); }, "no parameter 'inn.weight'");
    OptimStateDict id;
    id.state[Name(int64_t{99})] = {};
    expect_throws<KeyError>([&] { load(id); }, "id 99; the optimizer has 14 parameters");
    torch::optim::Adam other({at::ones({2}).requires_grad_()}, 1e-2);
    expect_throws<KeyError>([&] { optim_state_dict(*model, other); }, "is none of the model");
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
    train(model, sgd, 0, 1);
    const auto by_sgd = optim_state_dict(*model, sgd);
    expect_throws<ValueError>([&] { optim_state_dict_to_load(*model, optimizer, by_sgd, {.load_directly = true}); },
                              "of another kind");
    const auto kept = optim_state_dict(*model, optimizer).state.at(Name("in.weight")).at("exp_avg");
    expect_bit_equal(kept, saved.state.at(Name("in.weight")).at("exp_avg"));
    torch::optim::LBFGS other_kind(model->parameters());
    expect_throws<NotImplementedError>([&] { optim_state_dict(*model, other_kind); }, "SGD, RMSprop and Adagrad");
    set_form(model, StateDictType::LOCAL_STATE_DICT);
    expect_throws<NotImplementedError>([&] { optim_state_dict(*model, optimizer); }, "use SHARDED_STATE_DICT");
  });
}

TEST_CASE("row 114: the norm of bfloat16 gradients is computed in float32, and 0 without gradients") {
  run_ranks(2, [](int) {
    Block block(64, 33);
    fill_parameters(*block, 3);
    block->to(at::kBFloat16);
    const FullyShardedDataParallel model(block);
    double squares = 0;
    for (auto& parameter : model->parameters()) {
      const auto full = make_batch(9, parameter.size(0), parameter.numel() / parameter.size(0)).to(at::kBFloat16);
      squares += full.to(at::kDouble).square().sum().item<double>();
      parameter.mutable_grad() =
          distribute_tensor(full.view(parameter.sizes()), device_mesh(parameter), placements(parameter));
    }
    std::vector<at::Tensor> grads;
    for (const auto& parameter : model->parameters()) {
      grads.push_back(parameter.grad());
    }
    const auto norm = get_total_norm(grads);
    TESSERA_EXPECT(norm.scalar_type() == at::kFloat);
    expect_close(norm, at::full({}, std::sqrt(squares), at::kFloat), {.rtol = 1e-5, .atol = 0});
    expect_equal(get_total_norm({}).item<float>(), 0.f);
    TESSERA_EXPECT(model.clip_grad_norm_(1e9).scalar_type() == at::kBFloat16);
  });
}

TEST_CASE("state that is loaded while parameters are unsharded is that of their shards") {
  const bool by_forward = GENERATE(true, false);
  run_ranks(2, [&](int) {
    auto model = make_model();
    torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
    train(model, optimizer, 0, 1);
    for (const auto type : {StateDictType::FULL_STATE_DICT, StateDictType::SHARDED_STATE_DICT}) {
      set_form(model, type);
      const auto saved = optim_state_dict(*model, optimizer);
      if (by_forward) {
        model(make_batch(1, 3, 5));
      } else {
        model.unshard();
      }
      TESSERA_EXPECT(!is_dtensor(model->in->weight));
      const auto loaded = optim_state_dict_to_load(*model, optimizer, saved);
      TESSERA_EXPECT(is_dtensor(loaded.state.at(Name(int64_t{0})).at("exp_avg")));
    }
  });
}

TEST_CASE("row 115: names of parameters and back, for wrapped and plain models; a tied one has its first name") {
  run_ranks(2, [](int) {
    const auto plain = make_tower();
    const auto model = make_model();
    for (const torch::nn::Module* module :
         {static_cast<const torch::nn::Module*>(plain.get()), static_cast<const torch::nn::Module*>(&model.module())}) {
      const auto by_name = fqn_to_param(*module);
      const auto by_param = param_to_fqn(*module);
      expect_equal(by_name.size(), 14u);
      expect_equal(by_param.size(), 14u);
      expect_equal(by_param[1].second, std::string("in.bias"));
      for (const auto& [param, name] : by_param) {
        TESSERA_EXPECT(by_name.at(name).is_same(param));
      }
    }
    auto tower = make_tower();
    tie_parameter(*tower->blocks[1]->up, "weight", tower->blocks[0]->up->weight);
    expect_equal(param_to_fqn(*tower).size(), 13u);
    expect_equal(fqn_to_param(*tower).size(), 14u);
  });
}

}  // namespace tessera::testing
