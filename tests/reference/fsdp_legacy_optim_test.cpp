// Optimizer state by the functions before optim_state_dict, from a dict of the program's own, and by one rank for all.

#include <ATen/ops/ones.h>
#include <torch/optim/adam.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/context/comm_stats.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"
#include "fsdp1/fsdp_legacy_optim_state.h"
#include "fsdp1/fsdp_optim_state.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/reference/captured_warnings.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using OptimKey = OptimStateDict::Key;

/// All ranks have the same data.
template <class M>
void train_with(M& model, torch::optim::Adam& optimizer, int first, int last) {
  for (int step = first; step < last; ++step) {
    optimizer.zero_grad();
    weighted_loss(model(make_batch(static_cast<uint64_t>(step), 3, 5))).backward();
    optimizer.step();
  }
}

OptimStateDict saved_in_form(const TowerModel& model, torch::optim::Adam& optimizer, const StateDictSettings& settings,
                             const OptimStateDictOptions& options = {}) {
  OptimStateDict dict;
  FSDP::state_dict_type(*model, settings, [&] { dict = optim_state_dict(*model, optimizer, options); });
  return dict;
}

StateDictSettings full_form(bool rank0_only) {
  return StateDictSettings::make(StateDictType::FULL_STATE_DICT, std::nullopt,
                                 FullOptimStateDictConfig{.rank0_only = rank0_only});
}

void expect_same_dict(const OptimStateDict& a, const OptimStateDict& b) {
  TESSERA_EXPECT(a.param_groups == b.param_groups);
  expect_equal(a.state.size(), b.state.size());
  for (const auto& [key, entry] : a.state) {
    expect_equal(entry.size(), b.state.at(key).size());
    for (const auto& [field, tensor] : entry) {
      const auto& other = b.state.at(key).at(field);
      expect_equal(is_dtensor(tensor), is_dtensor(other));
      expect_equal(tensor.scalar_type(), other.scalar_type());
      if (is_dtensor(tensor)) {
        TESSERA_EXPECT(placements(tensor) == placements(other));
      }
      expect_bit_equal(is_dtensor(tensor) ? to_local(tensor) : tensor, is_dtensor(other) ? to_local(other) : other);
    }
  }
}

void expect_one_warning(const CapturedWarnings& warnings, const std::string& text) {
  expect_equal(warnings.texts().size(), 1u);
  TESSERA_EXPECT(warnings.texts()[0].find(text) != std::string::npos);
}

}  // namespace

TEST_CASE("row 107: the full and sharded dicts of old names warn, and are those of the new calls") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [](int rank) {
      auto model = make_model();
      torch::optim::Adam optimizer(model->parameters(), 1e-2);
      train_with(model, optimizer, 0, 2);
      const auto expected = saved_in_form(model, optimizer, full_form(false));
      const auto sharded = saved_in_form(model, optimizer, StateDictSettings::make(StateDictType::SHARDED_STATE_DICT));
      const auto before = FSDP::get_state_dict_type(*model);
      {
        const CapturedWarnings warnings;
        const auto full = full_optim_state_dict(*model, optimizer);
        expect_one_warning(warnings,
                           "full_optim_state_dict is deprecated: set FULL_STATE_DICT with FSDP::set_state_dict_type, "
                           "and call optim_state_dict");
        expect_same_dict(full, rank == 0 ? expected : OptimStateDict());
      }
      {
        const CapturedWarnings warnings;
        expect_same_dict(full_optim_state_dict(*model, optimizer, {.rank0_only = false}), expected);
        expect_equal(warnings.texts().size(), 1u);
      }
      {
        const CapturedWarnings warnings;
        expect_same_dict(sharded_optim_state_dict(*model, optimizer), sharded);
        expect_one_warning(warnings, "sharded_optim_state_dict is deprecated: set SHARDED_STATE_DICT");
      }
      TESSERA_EXPECT(FSDP::get_state_dict_type(*model) == before);
    });
  }
}

TEST_CASE("row 108: a full dict that every rank has is sharded without traffic, one that rank 0 has is sent") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int rank) {
      FSDPOptions options;
      if (ranks == 4) {  // the first rank's dict comes axis by axis
        options.sharding_strategy = Strategy::HYBRID_SHARD;
        options.device_mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"});
      }
      auto model = make_model(options);
      torch::optim::Adam optimizer(model->parameters(), 1e-2);
      train_with(model, optimizer, 0, 2);
      const auto full = saved_in_form(model, optimizer, full_form(false));
      const auto own = saved_in_form(model, optimizer, StateDictSettings::make(StateDictType::SHARDED_STATE_DICT));
      const auto expected = rekey_optim_state_dict(own, OptimStateKeyType::PARAM_ID, *model, optimizer);
      const CapturedWarnings warnings;
      reset_comm_stats();
      expect_same_dict(shard_full_optim_state_dict(full, *model, optimizer), expected);
      expect_equal(comm_stats().calls(), 0);
      expect_one_warning(warnings, "shard_full_optim_state_dict is deprecated");

      reset_comm_stats();
      const auto scattered = scatter_full_optim_state_dict(rank == 0 ? full : OptimStateDict(), *model, optimizer);
      TESSERA_EXPECT(ranks == 1 || comm_stats().calls() > 0);
      expect_same_dict(scattered, expected);
      TESSERA_EXPECT(warnings.texts().at(1).starts_with("scatter_full_optim_state_dict is deprecated"));

      reset_comm_stats();
      expect_same_dict(flatten_sharded_optim_state_dict(own, *model, optimizer), expected);
      expect_equal(comm_stats().calls(), 0);
      TESSERA_EXPECT(warnings.texts().at(2).starts_with("flatten_sharded_optim_state_dict is deprecated"));

      // Entries that lie otherwise are moved.
      auto elsewhere = own;
      for (auto& [key, entry] : elsewhere.state) {
        for (auto& [field, tensor] : entry) {
          if (is_dtensor(tensor)) {
            tensor = redistribute(tensor, Placements(placements(tensor).size(), Replicate()));
          }
        }
      }
      expect_same_dict(flatten_sharded_optim_state_dict(elsewhere, *model, optimizer), expected);
    });
  }
}

TEST_CASE("row 108: what does not fit on the first rank is refused on all of them, and plain models by name") {
  run_ranks(3, [](int rank) {
    auto model = make_model();
    torch::optim::Adam optimizer(model->parameters(), 1e-2);
    train_with(model, optimizer, 0, 1);
    const auto full = saved_in_form(model, optimizer, full_form(false));
    const CapturedWarnings warnings;
    const auto scatter = [&](const OptimStateDict& dict) {
      scatter_full_optim_state_dict(rank == 0 ? dict : OptimStateDict(), *model, optimizer);
    };
    auto mixed = full;
    mixed.state[OptimKey(int64_t{0})] = {};
    expect_throws<ValueError>([&] { scatter(mixed); }, "keys are names and ids");
    expect_throws<ValueError>([&] { scatter(sharded_optim_state_dict(*model, optimizer)); },
                              "is a DTensor, which the first rank cannot give the others alone");
    auto sizes = full;
    sizes.state.at(OptimKey("in.weight")).at("exp_avg") = at::ones({3});
    expect_throws<ValueError>([&] { scatter(sizes); }, "the state of 'in.weight' is [3]");
    auto unknown = full;
    unknown.state[OptimKey("inn.weight")] = {};
    expect_throws<KeyError>([&] { scatter(unknown); }, "no parameter 'inn.weight'");
    expect_throws<ValueError>([&] { scatter({}); }, "differ in number or sizes");
    scatter(full);

    auto plain = make_tower();
    torch::optim::Adam plain_optimizer(plain->parameters(), 1e-2);
    expect_throws<StateError>([&] { full_optim_state_dict(*plain, plain_optimizer); },
                              "full_optim_state_dict: the model has no module that FullyShardedDataParallel wrapped");
  });
}

TEST_CASE("row 105: a dict of the program's own is saved in place of the optimizer's; a group says who keeps it") {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](int rank) {
      auto model = make_model();
      torch::optim::Adam optimizer(model->parameters(), 1e-2);
      train_with(model, optimizer, 0, 2);
      const auto full = saved_in_form(model, optimizer, full_form(false));
      auto own = saved_in_form(model, optimizer, StateDictSettings::make(StateDictType::SHARDED_STATE_DICT));
      own.state.at(OptimKey("in.weight")).at("exp_avg").mul_(2);
      own.param_groups[0].options["lr"] = 0.5;
      for (const auto key_type : {OptimStateKeyType::PARAM_NAME, OptimStateKeyType::PARAM_ID}) {
        const auto source = rekey_optim_state_dict(own, key_type, *model, optimizer);
        const auto saved = saved_in_form(model, optimizer, full_form(false), {.optim_state_dict = &source});
        auto expected = full;
        auto& moment = expected.state.at(OptimKey("in.weight")).at("exp_avg");
        moment = moment * 2;
        expected.param_groups[0].options["lr"] = 0.5;
        expect_same_dict(saved, expected);
      }
      expect_equal(static_cast<torch::optim::AdamOptions&>(optimizer.param_groups()[0].options()).lr(), 1e-2);

      const auto backwards = new_group(ranks == 2 ? std::vector<int64_t>{1, 0} : std::vector<int64_t>{2, 1, 0});
      const auto kept = saved_in_form(model, optimizer, full_form(true), {.group = &backwards});
      expect_equal(kept.state.size(), rank == ranks - 1 ? 14u : 0u);

      auto fewer = own;
      fewer.param_groups[0].params.pop_back();
      expect_throws<ValueError>(
          [&] { saved_in_form(model, optimizer, full_form(false), {.optim_state_dict = &fewer}); },
          "optim_state_dict: the groups of the dict and of the optimizer differ");
      auto unknown = own;
      unknown.state[OptimKey("inn.weight")] = {};
      expect_throws<KeyError>(
          [&] { saved_in_form(model, optimizer, full_form(false), {.optim_state_dict = &unknown}); },
          "optim_state_dict: the optimizer has no parameter 'inn.weight'");
    });
  }
}

TEST_CASE("row 106: with rank0_only one rank's dict is all ranks', and training resumes from it") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int rank) {
      auto reference = make_tower();
      torch::optim::Adam reference_optimizer(reference->parameters(), 1e-2);
      train_with(reference, reference_optimizer, 0, 2);
      const auto saved = optim_state_dict(*reference, reference_optimizer);
      std::vector<int64_t> order;
      for (int64_t i = ranks; i-- > 0;) {
        order.push_back(i);
      }
      const auto backwards = new_group(order);
      for (const bool by_group : {false, true}) {
        auto model = make_model();
        FSDP::load_state_dict(*model, FSDP::state_dict(*reference));
        torch::optim::Adam optimizer(model->parameters(), 77);
        FSDP::set_state_dict_type(*model, full_form(/*rank0_only=*/true));
        const int source = by_group ? ranks - 1 : 0;
        optim_state_dict_to_load(*model, optimizer, rank == source ? saved : OptimStateDict(),
                                 {.load_directly = true, .group = by_group ? &backwards : nullptr});
        auto plain = make_tower();
        FSDP::load_state_dict(*plain, FSDP::state_dict(*reference));
        torch::optim::Adam plain_optimizer(plain->parameters(), 77);
        optim_state_dict_to_load(*plain, plain_optimizer, saved, {.load_directly = true});
        train_with(plain, plain_optimizer, 2, 4);
        train_with(model, optimizer, 2, 4);
        check_sharded_parity(*plain, *model, {.tolerance = {.rtol = 1e-5, .atol = 1e-5}});
      }
    });
  }
}

}  // namespace tessera::testing
