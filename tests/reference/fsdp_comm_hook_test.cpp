// FullyShardedDataParallel: gradients that are reduced by a hook.

#include <algorithm>

#include "comm/collectives.h"
#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "nn/linear.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr Strategy kHookStrategies[] = {Strategy::FULL_SHARD, Strategy::SHARD_GRAD_OP, Strategy::NO_SHARD};

/// Adds up over all ranks, and divides by nothing.
void sum_up(const at::Tensor& full_flat_grad, const at::Tensor& output) {
  if (output.defined()) {
    reduce_scatter(output, full_flat_grad, ReduceOp::Sum, default_group());
  } else {
    all_reduce(full_flat_grad, ReduceOp::Sum, default_group());
  }
}

void expect_equal_gradients(const TowerModel& actual, const TowerModel& expected) {
  const auto wanted = expected->named_parameters();
  for (const auto& item : actual->named_parameters()) {
    expect_bit_equal(to_local(item.value().grad()), to_local(wanted[item.key()].grad()));
  }
}

/// One path for all, one for rank 0 alone, and one for nobody.
struct PathsImpl : torch::nn::Module {
  PathsImpl() {
    common = register_module("common", tessera::nn::Linear(4, 3));
    of_rank_0 = register_module("of_rank_0", tessera::nn::Linear(4, 3));
    unused = register_module("unused", tessera::nn::Linear(4, 3));
  }
  at::Tensor forward(at::Tensor x) { return get_rank() == 0 ? common(x) + of_rank_0(x) : common(x); }

  tessera::nn::Linear common{nullptr}, of_rank_0{nullptr}, unused{nullptr};
};
TESSERA_MODULE(Paths);

}  // namespace

TEST_CASE("row 111: an average written by hand is the engine's, and the hook sees each unit's gradients once") {
  using Sizes = std::vector<std::pair<int64_t, int64_t>>;
  const int world_size = GENERATE(1, 2, 4);
  run_ranks(world_size, [&](int) {
    for (const auto strategy : kHookStrategies) {
      const auto built_in = make_model({.sharding_strategy = strategy});
      const auto hooked = make_model({.sharding_strategy = strategy});
      Sizes sizes;
      hooked.register_comm_hook({.run = [&](const at::Tensor& full_flat_grad, const at::Tensor& output) {
        TESSERA_EXPECT(full_flat_grad.dim() == 1 && full_flat_grad.scalar_type() == at::kFloat);
        sizes.emplace_back(full_flat_grad.numel(), output.defined() ? output.numel() : 0);
        full_flat_grad.div_(world_size);
        sum_up(full_flat_grad, output);
      }});
      // In backward's order, padded: block1, block0, root.
      const bool is_whole = world_size == 1 || strategy == Strategy::NO_SHARD;
      const auto expected = is_whole          ? Sizes{{112, 0}, {112, 0}, {96, 0}}
                            : world_size == 2 ? Sizes{{128, 64}, {128, 64}, {144, 72}}
                                              : Sizes{{192, 48}, {192, 48}, {224, 56}};
      for (int step = 0; step < 2; ++step) {
        sizes.clear();
        run_backward(hooked);
        expect_equal(sizes, expected);
        run_backward(built_in);
        expect_equal_gradients(hooked, built_in);
      }
    }
  });
}

TEST_CASE("row 111: the engine does not divide what a hook gives, and calls none inside of no_sync") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [&](int) {
    for (const auto strategy : kHookStrategies) {
      const auto model = make_model({.sharding_strategy = strategy});
      int calls = 0;
      model.register_comm_hook({.run = [&](const at::Tensor& full_flat_grad, const at::Tensor& output) {
        ++calls;
        sum_up(full_flat_grad, output);
      }});
      model.no_sync([&] { run_backward(model); });
      expect_equal(calls, 0);
      run_backward(model);
      expect_equal(calls, 3);
      const auto reference = reference_after_backward();
      for (auto& parameter : reference->parameters()) {
        parameter.mutable_grad().mul_(2 * world_size);
      }
      check_sharded_parity(*reference, *model, {.tolerance = {.rtol = 1e-5, .atol = 1e-5}});
    }
  });
}

TEST_CASE("rows 76, 111: the hooks at hand: the engine's average, and sums in half the bytes") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [&](int) {
    for (const auto strategy : kHookStrategies) {
      const auto built_in = make_model({.sharding_strategy = strategy});
      reset_comm_stats();
      run_backward(built_in);
      const auto kind = strategy == Strategy::NO_SHARD ? Collective::AllReduce : Collective::ReduceScatter;
      const auto bytes = comm_stats()[kind].bytes_sent;
      const DefaultState state(default_group());
      expect_equal(state.gradient_predivide_factor(), 2.0);
      expect_equal(state.gradient_postdivide_factor(), world_size / 2.0);

      const auto by_default = make_model({.sharding_strategy = strategy});
      TESSERA_EXPECT(!by_default.low_precision_hook_enabled());
      by_default.register_comm_hook(default_hook(state));
      TESSERA_EXPECT(!by_default.low_precision_hook_enabled());
      run_backward(by_default);
      expect_equal_gradients(by_default, built_in);

      for (const auto& [hook, error] :
           {std::pair(bf16_compress_hook(state), 2e-2), {fp16_compress_hook(state), 2e-3}}) {
        const auto compressed = make_model({.sharding_strategy = strategy});
        compressed.register_comm_hook(hook);
        TESSERA_EXPECT(compressed.low_precision_hook_enabled());
        reset_comm_stats();
        run_backward(compressed);
        if (world_size == 2 && strategy == Strategy::FULL_SHARD) {
          // 64 + 8, 64 + 8 and 72 + 16 gradients and flags; the flags are not compressed.
          expect_equal(bytes, 4 * (72 + 72 + 88));
          expect_equal(comm_stats()[kind].bytes_sent, 2 * (64 + 64 + 72) + 4 * (8 + 8 + 16));
        }
        TESSERA_EXPECT(10 * comm_stats()[kind].bytes_sent < 6 * bytes);
        const auto gradient = [](const TowerModel& model) { return full_tensor(model->blocks[0]->up->weight.grad()); };
        TESSERA_EXPECT(gradient(compressed).scalar_type() == at::kFloat);
        expect_close(gradient(compressed), gradient(built_in), {.rtol = error, .atol = error * 0.1});
        TESSERA_EXPECT(!gradient(compressed).equal(gradient(built_in)));
      }
    }
  });
}

TEST_CASE("row 111: with a hook too, what no rank used has no gradient, and what one rank used is averaged") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [&](int) {
    for (const auto strategy : {Strategy::FULL_SHARD, Strategy::NO_SHARD}) {
      Paths paths;
      fill_parameters(*paths, 5);
      paths->common->bias.set_requires_grad(false);
      const FullyShardedDataParallel model(paths, {.sharding_strategy = strategy});
      model.register_comm_hook(bf16_compress_hook(DefaultState(default_group())));
      model(make_batch(1, 2, 4)).sum().backward();
      TESSERA_EXPECT(model->common->weight.grad().defined() && !model->common->bias.grad().defined());
      TESSERA_EXPECT(!model->unused->weight.grad().defined() && !model->unused->bias.grad().defined());
      // Each bias adds to 2 rows, on rank 0 only.
      expect_equal(full_tensor(model->of_rank_0->bias.grad()).sum().item<float>(), 3 * 2.f / world_size);
    }
  });
}

TEST_CASE("rows 111, 116: register_comm_hook is refused below the root, with replicas, twice, and for an empty hook") {
  run_ranks(4, [](int) {
    const CommHook hook{.run = sum_up};
    const auto model = make_model();
    const auto child = FSDP::fsdp_modules(*model)[1];
    run_backward(model);
    expect_throws<StateError>([&] { child.register_comm_hook(hook); },
                              "BlockImpl is a unit of a larger model; call it on the outermost one");
    FSDP::summon_full_params(*model, {}, [&] {
      expect_throws<ValueError>([&] { model.register_comm_hook(hook); },
                                "TowerImpl is in the state SUMMON_FULL_PARAMS");
    });
    expect_throws<ValueError>([&] { model.register_comm_hook({}); }, "the hook's run is empty");
    TESSERA_EXPECT(!model.low_precision_hook_enabled());
    model.register_comm_hook(hook);
    expect_throws<StateError>([&] { model.register_comm_hook({}); },
                              "register_comm_hook: the root has a hook already; register one, once");
    for (const auto strategy : {Strategy::HYBRID_SHARD, Strategy::_HYBRID_SHARD_ZERO2}) {
      const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"});
      const auto hybrid = make_model({.sharding_strategy = strategy, .device_mesh = mesh});
      expect_throws<NotImplementedError>(
          [&] { hybrid.register_comm_hook(hook); },
          fmt::format("the root is {}, whose gradients go over two groups of ranks", to_string(strategy)));
      expect_gradients_of_average(hybrid);
    }
    // A unit below that has one already: nothing is registered.
    auto outer = make_tower();
    const FullyShardedDataParallel inner(outer->blocks[0]);
    inner.register_comm_hook(default_hook(DefaultState(default_group())));
    const FullyShardedDataParallel whole(outer);
    expect_throws<StateError>([&] { whole.register_comm_hook(hook); }, "'block0' has a hook already");
    expect_gradients_of_average(whole);
  });
}

TEST_CASE("a hook that throws in the root's reduction leaves the model usable") {
  run_ranks(2, [](int) {
    for (const auto strategy : kHookStrategies) {
      const auto model = make_model({.sharding_strategy = strategy});
      int calls = 0;
      model.register_comm_hook({.run = [&](const at::Tensor& full_flat_grad, const at::Tensor& output) {
        TESSERA_CHECK(Error, ++calls != 3, "on purpose");
        full_flat_grad.div_(2);
        sum_up(full_flat_grad, output);
      }});
      expect_throws<Error>([&] { run_backward(model); }, "on purpose");
      model->zero_grad();
      expect_gradients_of_average(model);
    }
  });
}

}  // namespace tessera::testing
