// FullyShardedDataParallel: which modules become units, by policies and by wrap().

#include <optional>

#include "dtensor/dtensor.h"
#include "nn/linear.h"
#include "testing/expect.h"
#include "testing/fsdp_models/skip_models.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("rows 61, 73: policies choose units") {
  run_ranks(2, [](int) {
    const auto units_with = [](WrapPolicy policy, FSDPOptions options = {}) {
      options.auto_wrap_policy = std::move(policy);
      auto tower = make_tower();
      wrap_module(*tower, options);
      return unit_names(*tower);
    };
    using Names = std::vector<std::string>;
    expect_equal(units_with({}), Names{""});
    expect_equal(units_with(block_policy()), Names{"", "block0", "block1"});
    expect_equal(units_with(module_wrap_policy<BlockImpl, torch::nn::LayerNormImpl>()),
                 Names{"", "block0", "block1", "norm"});
    expect_equal(units_with(always_wrap_policy()), Names{"", "in", "block0", "block0.up", "block0.down", "block1",
                                                         "block1.up", "block1.down", "norm", "out"});
    // in 48, blocks 110 (up 54, down 56), norm 16, out 27
    expect_equal(units_with(size_based_auto_wrap_policy({.min_num_params = 50})),
                 Names{"", "block0.up", "block0.down", "block1.up", "block1.down"});
    expect_equal(units_with(size_based_auto_wrap_policy({.min_num_params = 57})), Names{"", "block0", "block1"});
    expect_equal(units_with(size_based_auto_wrap_policy()), Names{""});
    expect_equal(units_with(auto_wrap_policy([](torch::nn::Module& module, bool recurse, int64_t numel) {
                   return recurse ? dynamic_cast<BlockImpl*>(&module) == nullptr : numel == 48;
                 })),
                 Names{"", "in"});
    auto tower = make_tower();
    const auto no_shard = [](FSDPOptions& options) { options.sharding_strategy = Strategy::NO_SHARD; };
    wrap_module(*tower, {.auto_wrap_policy = custom_policy([&](torch::nn::Module& module) {
                           return &module == tower->blocks[0].get() ? WrapChoice(no_shard)
                                                                    : WrapChoice(&module == tower->out.get());
                         })});
    expect_equal(unit_names(*tower), Names{"", "block0", "out"});
    TESSERA_EXPECT(FSDP::fsdp_modules(*tower)[1].sharding_strategy() == Strategy::NO_SHARD);
    TESSERA_EXPECT(FSDP::fsdp_modules(*tower)[2].sharding_strategy() == Strategy::FULL_SHARD);
  });
}

TEST_CASE("row 61: a threshold of 1e5 elements, and a function with an argument that is bound to it") {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [](int) {
      const auto units_with = [](const WrapPolicy& policy) {
        tessera::nn::Sequential chain;
        chain->push_back(tessera::nn::Linear(400, 249));  // 99 849
        chain->push_back(tessera::nn::Linear(400, 250));  // 100 250
        chain->push_back(tessera::nn::Linear(3, 2));
        wrap_module(*chain, {.auto_wrap_policy = policy});
        return unit_names(*chain);
      };
      using Names = std::vector<std::string>;
      expect_equal(units_with(size_based_auto_wrap_policy({.min_num_params = 100'000})), Names{"", "1"});
      const auto larger_than = [](int64_t least) {
        return auto_wrap_policy(
            [least](torch::nn::Module& /*module*/, bool recurse, int64_t numel) { return recurse || numel >= least; });
      };
      expect_equal(units_with(larger_than(100'000)), Names{"", "1"});
      expect_equal(units_with(larger_than(99'000)), Names{"", "0", "1"});
    });
  }
}

TEST_CASE("row 30: wrap() wraps inside of an EnableWrap only; scopes nest") {
  run_ranks(2, [](int) {
    const auto is_wrapped = [](torch::nn::Module& module) { return !FSDP::fsdp_modules(module).empty(); };
    TESSERA_EXPECT(!is_wrapped(*wrap(tessera::nn::Linear(2, 2))));
    const EnableWrap scope({.sharding_strategy = Strategy::SHARD_GRAD_OP});
    TESSERA_EXPECT(is_wrapped(*wrap(tessera::nn::Linear(2, 2))));
    {
      const EnableWrap inner({.sharding_strategy = Strategy::NO_SHARD});
      auto layer = wrap(tessera::nn::Linear(2, 2));
      TESSERA_EXPECT(FSDP::fsdp_modules(*layer)[0].sharding_strategy() == Strategy::NO_SHARD);
    }
    auto layer = wrap(tessera::nn::Linear(2, 2));
    TESSERA_EXPECT(FSDP::fsdp_modules(*layer)[0].sharding_strategy() == Strategy::SHARD_GRAD_OP);
  });
}

TEST_CASE("row 30: SkipModel: units are what wrap() was given inside of an EnableWrap, and names stay") {
  const int world_size = GENERATE(2, 4);
  const bool double_nest = GENERATE(true, false);
  run_ranks(world_size, [&](int rank) {
    const auto build = [&](bool wraps) {
      std::optional<EnableWrap> scope;
      if (wraps) {
        scope.emplace(FSDPOptions());
      }
      return SkipModel(double_nest);
    };
    auto plain = build(false), wrapped = build(true);
    const std::vector<std::string> names{"linear.weight", "linear_skip.lin.weight",
                                         "nested_linear.nested_linear.weight"};
    expect_equal(plain->named_parameters().keys(), names);
    expect_equal(wrapped->named_parameters().keys(), names);
    expect_equal(unit_names(*plain), std::vector<std::string>{});
    expect_equal(unit_names(*wrapped), double_nest
                                           ? std::vector<std::string>{"nested_linear", "nested_linear.nested_linear"}
                                           : std::vector<std::string>{"nested_linear"});
    const auto units = FSDP::fsdp_modules(*wrapped);
    TESSERA_EXPECT(units[0].options().device_id == at::Device(at::kCPU) && units[0].has_params() == !double_nest);
    TESSERA_EXPECT(!double_nest || !units[1].options().device_id);

    fill_parameters(*plain, 3);
    FSDP::load_state_dict(*wrapped, FSDP::state_dict(*plain));
    const auto loss_of = [](SkipModel& model, int of_rank) {
      return weighted_loss(model(make_batch(static_cast<uint64_t>(of_rank), 2, 10)));
    };
    const auto loss = loss_of(wrapped, rank);
    expect_bit_equal(loss.detach(), loss_of(plain, rank).detach());
    loss.backward();
    average_reference(*plain, world_size, [&](int r) { loss_of(plain, r).backward(); });
    expect_close(full_tensor(wrapped->nested_linear->nested_linear->weight.grad()),
                 plain->nested_linear->nested_linear->weight.grad());
  });
}

}  // namespace tessera::testing
