// Patches of what fully_shard communicates and does, and models that make themselves late by them.

#include <atomic>
#include <chrono>
#include <limits>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/fsdp_models/mixture_of_experts.h"
#include "testing/fsdp_models/module_with_delay.h"
#include "testing/fsdp_models/nested_wrapped_models.h"
#include "testing/fsdp_models/parity_driver.h"
#include "testing/fsdp_models/patches.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/reference/captured_warnings.h"
#include "tests/reference/dp_mesh.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// Units: root, module.1, module.1.0 inside of it, module.2.
std::shared_ptr<FSDPTestModel> sharded(const InitOptions& options, const ModelClass& model = nested_wrapped_model()) {
  auto init = options;
  init.fsdp_init_mode = FSDPInitMode::RECURSIVE;
  init.deterministic = true;
  auto result = model.init(init);
  wrap_unit(*result, init);
  return result;
}

at::Tensor step(FSDPTestModel& model) {
  const auto input = model.get_input(at::kCPU);
  const auto loss = model.get_loss(input, model.forward(input));
  model.run_backward(loss);
  return loss.detach();
}

struct Calls {
  int gathers = 0, scatters = 0, all_reduces = 0;
  bool operator==(const Calls&) const = default;
};

/// The calls of one step, and what dtypes they have to have.
Calls count_calls(FSDPTestModel& model, at::ScalarType gathered, at::ScalarType reduced) {
  Calls calls;
  const auto gather = patch_all_gather([&](const AllGatherFn& original, const at::Tensor& output,
                                           const at::Tensor& input, const ProcessGroupPtr& group) {
    ++calls.gathers;
    TESSERA_EXPECT(output.scalar_type() == gathered && input.scalar_type() == gathered);
    expect_equal(output.numel(), get_world_size(group) * input.numel());
    return original(output, input, group);
  });
  const auto scatter = patch_reduce_scatter([&](const ReduceScatterFn& original, const at::Tensor& output,
                                                const at::Tensor& input, ReduceOp op, const ProcessGroupPtr& group) {
    ++calls.scatters;
    TESSERA_EXPECT(output.scalar_type() == reduced && input.scalar_type() == reduced);
    expect_equal(input.numel(), get_world_size(group) * output.numel());
    return original(output, input, op, group);
  });
  const auto reduce = patch_all_reduce(
      [&](const AllReduceFn& original, const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group) {
        ++calls.all_reduces;
        TESSERA_EXPECT(tensor.scalar_type() == reduced);
        return original(tensor, op, group);
      });
  step(model);
  return calls;
}

/// Whether the calling rank's slots are those of the library.
void expect_no_patches() {
  const auto slots = comm_overrides();
  using AllGather = Pending (*)(const at::Tensor&, const at::Tensor&, const ProcessGroupPtr&);
  using ReduceScatter = Pending (*)(const at::Tensor&, const at::Tensor&, ReduceOp, const ProcessGroupPtr&);
  const auto* gather = slots->all_gather.target<AllGather>();
  const auto* scatter = slots->reduce_scatter.target<ReduceScatter>();
  TESSERA_EXPECT(gather && *gather == all_gather_async && scatter && *scatter == reduce_scatter_async);
  TESSERA_EXPECT(!slots->unshard && !slots->reshard && !slots->post_backward);
}

UnitSlot recorder(std::vector<std::string>& events, const char* name) {
  return [&events, name](const UnitCall& call) {
    events.push_back(fmt::format("{} {}", name, call.unit));
    call.run();
  };
}

double milliseconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

TEST_CASE("rows 31, 63: patches see each all-gather, reduce-scatter and all-reduce of a step, with its dtypes") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [&](int) {
    const auto model = sharded({.mesh = dp_mesh()});
    step(*model);
    // The root stays gathered for backward.
    TESSERA_EXPECT((count_calls(*model, at::kFloat, at::kFloat) == Calls{4 + 3, 4, 0}));
    expect_no_patches();
    InitOptions mixed{.mesh = dp_mesh()};
    mixed.fsdp_options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
    TESSERA_EXPECT((count_calls(*sharded(mixed), at::kBFloat16, at::kFloat) == Calls{7, 4, 0}));
    mixed.fsdp_options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16};
    TESSERA_EXPECT((count_calls(*sharded(mixed), at::kBFloat16, at::kBFloat16) == Calls{7, 4, 0}));
    // Replicas: an all-reduce a unit. Where a unit has one shard there is nothing to gather or scatter.
    const auto hsdp = init_device_mesh(at::kCPU, {2, world_size / 2}, {"replicate", "shard"});
    const auto expected = world_size == 4 ? Calls{7, 4, 4} : Calls{0, 0, 4};
    TESSERA_EXPECT(count_calls(*sharded({.mesh = hsdp}), at::kFloat, at::kFloat) == expected);
  });
}

TEST_CASE("row 32: patches of unshard, reshard and post_backward see a step's units in order") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [](int) {
    const auto model = sharded({.mesh = dp_mesh()});
    step(*model);
    step(*model);
    std::vector<std::string> events;
    {
      const auto unshard = patch_unshard(recorder(events, "unshard"));
      const auto reshard = patch_reshard(recorder(events, "reshard"));
      const auto end = patch_post_backward(recorder(events, "post_backward"));
      step(*model);
    }
    // Unshards are issued ahead; a unit that ends its backward reshards first.
    expect_equal(events, std::vector<std::string>{
                             "unshard root", "unshard module.1", "unshard module.1.0", "unshard module.2",
                             "reshard module.1.0", "reshard module.1", "reshard module.2", "unshard module.2",
                             "unshard module.1", "post_backward module.2", "reshard module.2", "unshard module.1.0",
                             "post_backward module.1.0", "reshard module.1.0", "post_backward module.1",
                             "reshard module.1", "post_backward root", "reshard root"});
    expect_no_patches();
  });
}

TEST_CASE("row 34: no rank has a patch before all have come to it, and none goes before all have ended it") {
  const int world_size = GENERATE(2, 4);
  std::atomic<int> came{0}, ended{0};
  run_ranks(world_size, [&](int rank) {
    delay(rank == 0 ? 50 : 0);
    ++came;
    {
      const auto patch =
          patch_all_gather([](const AllGatherFn& original, const at::Tensor& output, const at::Tensor& input,
                              const ProcessGroupPtr& group) { return original(output, input, group); });
      expect_equal(came.load(), world_size);
      delay(rank == world_size - 1 ? 50 : 0);
      ++ended;
    }
    expect_equal(ended.load(), world_size);
    expect_no_patches();
  });
}

TEST_CASE("row 34: what throws inside of a patch leaves the original, for the rank's thread alone") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [](int rank) {
    const auto model = sharded({.mesh = dp_mesh()});
    // Each rank's own replacement, without a lock; one of them throws on all ranks, in backward.
    int reshards = 0;
    const auto fail = [&] {
      const auto reshard = patch_reshard([&](const UnitCall& call) {
        reshards += rank + 1;
        call.run();
      });
      const auto scatter =
          patch_reduce_scatter([](const ReduceScatterFn&, const at::Tensor&, const at::Tensor&, ReduceOp,
                                  const ProcessGroupPtr&) -> Pending { throw ValueError("from inside"); });
      step(*model);
    };
    expect_throws<ValueError>(fail, "from inside");
    TESSERA_EXPECT(reshards >= 3 * (rank + 1) && reshards % (rank + 1) == 0);
    expect_no_patches();
    TESSERA_EXPECT((count_calls(*model, at::kFloat, at::kFloat) == Calls{7, 4, 0}));
  });
  run_ranks(world_size, [](int) { expect_no_patches(); });
}

TEST_CASE("row 34: a patch whose peers are gone ends with a warning, and does not throw") {
  run_ranks(2,
            [](int rank) {
              if (rank == 1) {
                const auto fail = [] {
                  const auto patch = patch_reshard([](const UnitCall& call) { call.run(); });
                  throw Error("a test failed");
                };
                expect_throws<Error>(fail, "a test failed");
                expect_no_patches();
                return;
              }
              const CapturedWarnings warnings;
              {
                const auto patch = patch_reshard([](const UnitCall& call) { call.run(); });
              }
              expect_equal(warnings.texts().size(), 1u);
              TESSERA_EXPECT(warnings.texts()[0].starts_with("a patch ends without its peers: "));
              expect_no_patches();
            },
            {.timeout = std::chrono::seconds(1)});
}

TEST_CASE("row 35: reduce_scatter_with_assert looks at the output before anything is sent") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [](int) {
    const auto reference = nested_wrapped_model().init({.mesh = dp_mesh(), .deterministic = true});
    const auto model = sharded({.mesh = dp_mesh()});
    const auto input = reference->get_input(at::kCPU);
    DataParallelReference(reference, dp_mesh()).run_backward(reference->forward(input).sum());
    int checks = 0;
    {
      // What the check writes is overwritten by the reduction: it came first.
      const auto patch =
          patch_reduce_scatter(std::bind_front(reduce_scatter_with_assert, [&](const at::Tensor& output) {
            ++checks;
            TESSERA_EXPECT(output.scalar_type() == at::kFloat && output.is_cpu() && output.dim() == 1);
            output.fill_(std::numeric_limits<float>::quiet_NaN());
          }));
      step(*model);
    }
    expect_equal(checks, 4);
    check_sharded_parity(*reference, *model);

    const auto refuse = [&] {
      const auto patch = patch_reduce_scatter(std::bind_front(reduce_scatter_with_assert, [](const at::Tensor& output) {
        TESSERA_EXPECT(output.scalar_type() == at::kBFloat16);
      }));
      step(*model);
    };
    expect_throws<ExpectationError>(refuse, "output.scalar_type() == at::kBFloat16");
    expect_no_patches();
  });
}

TEST_CASE("row 19: ModuleWithDelay is late by its delays, trains the same, and puts the reduce-scatter back") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [](int rank) {
    auto init = delayed_init_options(dp_mesh());
    TESSERA_EXPECT(init.device_init_mode == DEVICEInitMode::DEVICE_AFTER);
    TESSERA_EXPECT(Delays().after_loss == 0 && Delays().before_reduction == 0);
    const auto train = [&](double after_loss, double before_reduction) {
      const auto model = sharded(
          init, nested_wrapped_model_with_delay({.after_loss = after_loss, .before_reduction = before_reduction}));
      expect_equal(model->named_children().keys(), std::vector<std::string>{"module"});
      const auto begin = std::chrono::steady_clock::now();
      const auto losses = train_losses(*model, {.num_steps = 2});
      TESSERA_EXPECT(milliseconds_since(begin) >= 2 * (after_loss + 4 * before_reduction));
      expect_no_patches();
      return losses;
    };
    const auto losses = train(0, 0);
    expect_equal(train(20, 0), losses);
    expect_equal(train(0, 5), losses);
    expect_equal(train(5.0 * rank, 3.0 * (get_world_size() - rank)), losses);
    test_fsdp_parity(nested_wrapped_model_with_delay({.before_reduction = 2.0 * rank}),
                     {.mesh = dp_mesh(), .device_init_mode = init.device_init_mode});
  });
}

TEST_CASE("row 24: MixtureOfExperts: reshards that come late, on each rank at another time, change nothing") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [](int rank) {
    const auto is_patched_in_forward = [](FSDPTestModel& model) {
      bool is_patched = false;
      auto& experts = dynamic_cast<MixtureOfExpertsImpl&>(*dynamic_cast<ModuleWithDelayImpl&>(model).module);
      const ScopedHook hook(find_hook_point(experts.shared())->register_forward_pre_hook([&](HookPoint&, TensorRefs) {
        is_patched = static_cast<bool>(comm_overrides()->reshard);
      }));
      model.forward(model.get_input(at::kCPU));
      expect_no_patches();
      return is_patched;
    };
    const double delay_ms = 2.0 + 3 * rank;
    const auto late_model = mixture_of_experts_with_delay(delay_ms);
    const auto late = sharded({.mesh = dp_mesh()}, late_model);
    const auto begin = std::chrono::steady_clock::now();
    TESSERA_EXPECT(is_patched_in_forward(*late));
    // The shared layer's and the expert's; the root stays gathered.
    TESSERA_EXPECT(milliseconds_since(begin) >= 2 * delay_ms);
    const auto prompt = sharded({.mesh = dp_mesh()}, mixture_of_experts_with_delay(0));
    TESSERA_EXPECT(!is_patched_in_forward(*prompt));
    const auto plain = late_model.init({.mesh = dp_mesh(), .deterministic = true});
    TESSERA_EXPECT(!is_patched_in_forward(*plain));
    expect_equal(train_losses(*late, {.num_steps = 3}), train_losses(*prompt, {.num_steps = 3}));

    FSDPParityOptions options{.mesh = dp_mesh()};
    options.ref_init_fn = [](std::shared_ptr<FSDPTestModel> model) { return std::make_shared<DummyDDP>(model); };
    test_fsdp_parity(late_model, options);
  });
}

}  // namespace tessera::testing
