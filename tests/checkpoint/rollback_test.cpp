// Back to an earlier checkpoint: the optimizer has what it had then, and no more.

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <set>

#include "checkpoint/checkpoint.h"
#include "optim/fused_optimizers.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "tests/checkpoint/layouts.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

void expect_same_values(const dcp::StateDict& actual, const dcp::StateDict& expected) {
  expect_equal(actual.size(), expected.size());
  for (const auto& [key, value] : expected) {
    TESSERA_EXPECT(actual.contains(key));
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      expect_bit_equal(std::get<at::Tensor>(actual.at(key)), *tensor);
    } else if (const auto* count = std::get_if<int64_t>(&value)) {
      expect_equal(std::get<int64_t>(actual.at(key)), *count);
    } else {
      expect_equal(std::get<double>(actual.at(key)), std::get<double>(value));
    }
  }
}

/// A tower whose first bias is trained in some steps only; the optimizer has two groups.
template <class Optimizer, class Options>
struct Trainer {
  explicit Trainer(const Options& options, bool is_sharded) {
    fill_parameters(*model, 1);
    if (is_sharded) {
      shard_tower(model);
    }
    auto params = model->parameters();
    std::vector<torch::optim::OptimizerParamGroup> groups(2, std::vector<at::Tensor>());
    for (size_t i = 0; i < params.size(); ++i) {
      groups[i % 2].params().push_back(params[i]);
    }
    optimizer = std::make_unique<Optimizer>(groups, options);
  }
  void train(uint64_t step, bool with_bias = true) {
    optimizer->zero_grad();
    weighted_loss(model(make_batch(step, 6, 5))).backward();
    if (!with_bias) {
      model->in->bias.mutable_grad() = at::Tensor();
    }
    optimizer->step();
  }
  dcp::StateDict weights() { return clones(dcp::get_model_state_dict(model, kFull)); }
  dcp::StateDict state() { return clones(dcp::get_optimizer_state_dict(model, *optimizer, kFull)); }
  void save(const std::string& path) {
    dcp::save(path, {.model = dcp::get_model_state_dict(model),
                     .optimizer = dcp::get_optimizer_state_dict(model, *optimizer)});
  }
  void load(const std::string& path) {
    dcp::State all{.model = dcp::get_model_state_dict(model),
                   .optimizer = dcp::optimizer_state_to_load(path, model, *optimizer)};
    dcp::load(path, all);
    dcp::set_optimizer_state_dict(model, *optimizer, all.optimizer);
  }

  Tower model;
  std::unique_ptr<Optimizer> optimizer;
};

template <class Optimizer, class Options>
void check_rollback(const Options& options) {
  for (const bool is_sharded : {false, true}) {
    const TempFolder folder;
    run_ranks(2, [&](int) {
      Trainer<Optimizer, Options> trainer(options, is_sharded);
      const auto check = [&](const std::string& path) {
        trainer.save(path);
        const auto saved = trainer.state();
        trainer.train(1);
        const auto weights = trainer.weights(), state = trainer.state();
        trainer.train(2);
        trainer.load(path);
        expect_same_values(trainer.state(), saved);
        trainer.train(1);
        expect_same_values(trainer.weights(), weights);
        expect_same_values(trainer.state(), state);
        trainer.load(path);
      };
      check(folder.path("before the first step"));
      trainer.train(0, /*with_bias=*/false);
      check(folder.path("before the bias"));
    });
  }
}

}  // namespace

TEST_CASE("what had no state when it was saved has none after a rollback, and is trained again as it was") {
  check_rollback<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true));
  check_rollback<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01));
  check_rollback<torch::optim::SGD>(torch::optim::SGDOptions(0.01).momentum(0.9));
  check_rollback<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01).momentum(0.9).centered(true));
  check_rollback<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.01).initial_accumulator_value(0.5));
  check_rollback<optim::FusedAdamW>(torch::optim::AdamWOptions(0.01));
  check_rollback<optim::FusedSGD>(torch::optim::SGDOptions(0.01).momentum(0.9));
}

TEST_CASE("set_optimizer_state_dict takes away what a strict dict lacks, and nothing else") {
  run_ranks(2, [](int rank) {
    Trainer<torch::optim::Adam, torch::optim::AdamOptions> trainer(torch::optim::AdamOptions(0.01), true);
    trainer.train(0, /*with_bias=*/false);
    const auto less = trainer.state();
    trainer.train(1);
    auto more = trainer.state();
    more["state.in.bias.max_exp_avg_sq"] = at::ones({17});
    more["state.in.weight.max_exp_avg_sq"] = at::ones({17, 5});
    const auto set = [&](const dcp::StateDict& state, const dcp::StateDictOptions& options) {
      dcp::set_optimizer_state_dict(trainer.model, *trainer.optimizer, state, options);
    };
    set(more, kFull);
    expect_same_values(trainer.state(), more);
    set(less, {.full_state_dict = true, .ignore_frozen_params = true});
    expect_equal(trainer.state().size(), more.size());
    set(less, {.full_state_dict = true, .strict = false});
    expect_equal(trainer.state().size(), more.size());
    set(less, kFull);
    expect_same_values(trainer.state(), less);
    set(more, kFull);
    expect_throws<KeyError>([&] { set(rank == 0 ? less : dcp::StateDict(), kFull); },
                            "the dict is empty, which would take away all state");
    expect_equal(trainer.state().size(), more.size());
    set(rank == 0 ? less : dcp::StateDict(), {.broadcast_from_rank0 = true});
    expect_same_values(trainer.state(), less);
  });
}

TEST_CASE("Adagrad, which has state from the start, goes back to that") {
  run_ranks(2, [](int) {
    Trainer<torch::optim::Adagrad, torch::optim::AdagradOptions> trainer(
        torch::optim::AdagradOptions(0.01).initial_accumulator_value(0.5), true);
    const auto fresh = trainer.state();
    trainer.train(0);
    auto less = fresh;
    std::erase_if(less, [](const auto& entry) { return entry.first.starts_with("state."); });
    dcp::set_optimizer_state_dict(trainer.model, *trainer.optimizer, less, kFull);
    expect_same_values(trainer.state(), fresh);
    trainer.train(1);
  });
}

TEST_CASE(
    "a learning rate that a scheduler has lowered goes on as without a break, as checkpoint/format/state.h says") {
  using Steps = std::vector<double>;
  const TempFolder folder;
  constexpr int64_t kSaved = 5, kAll = 12;
  struct Run {
    Run() : optimizer(model->parameters(), torch::optim::SGDOptions(0.5)), scheduler(optimizer, 3, 0.5) {}
    double next_rate() {
      scheduler.step();
      return optimizer.param_groups()[0].options().get_lr();
    }
    torch::nn::Linear model{3, 5};
    torch::optim::SGD optimizer;
    torch::optim::StepLR scheduler;
  };
  Run whole;
  Steps expected;
  for (int64_t step = 0; step < kAll; ++step) {
    expected.push_back(whole.next_rate());
    if (step + 1 == kSaved) {
      dcp::save(folder.path("c"), {.optimizer = dcp::get_optimizer_state_dict(whole.model, whole.optimizer),
                                   .user = {{"scheduler steps", kSaved}}});
    }
  }
  REQUIRE(std::set<double>(expected.begin(), expected.end()).size() > 3);

  Run resumed;
  dcp::State state{.optimizer = dcp::optimizer_state_to_load(folder.path("c"), resumed.model, resumed.optimizer),
                   .user = {{"scheduler steps", int64_t{0}}}};
  dcp::load(folder.path("c"), state);
  const auto steps = std::get<int64_t>(state.user["scheduler steps"]);
  for (int64_t step = 0; step < steps; ++step) {
    resumed.scheduler.step();
  }
  dcp::set_optimizer_state_dict(resumed.model, resumed.optimizer, state.optimizer);
  Steps actual(expected.begin(), expected.begin() + steps);
  while (actual.size() < expected.size()) {
    actual.push_back(resumed.next_rate());
  }
  CHECK(actual == expected);
}

TEST_CASE("a rank whose optimizer does not fit is an error of all; an empty dict names a checkpoint of a model alone") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    torch::nn::Linear model(3, 5), other(3, 5);
    dcp::save(folder.path("c"), {.model = dcp::get_model_state_dict(model)});
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5));
    const auto message = "is no parameter of the model; pass the module that holds all of the optimizer's parameters";
    auto& wrong = rank == 1 ? other : model;
    expect_throws<ValueError>([&] { dcp::optimizer_state_to_load(folder.path("c"), wrong, optimizer); }, message);
    const auto set = [&] { dcp::set_optimizer_state_dict(wrong, optimizer, {}); };  // of plain models: each rank alone
    if (rank == 1) {
      expect_throws<ValueError>(set, message);
    } else {
      expect_throws<KeyError>(set, "the dict is empty");
    }
    const auto none = dcp::optimizer_state_to_load(folder.path("c"), model, optimizer);
    TESSERA_EXPECT(none.empty());
    expect_throws<KeyError>([&] { dcp::set_optimizer_state_dict(model, optimizer, none); },
                            "A checkpoint of a model alone has none: leave this call out");
  });
}

}  // namespace tessera::testing
