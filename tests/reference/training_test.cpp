// The common models train as published: losses are those of the Python models, sharded or not.

#include <ATen/core/grad_mode.h>

#include <cmath>
#include <limits>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "fsdp1/fsdp.h"
#include "fully_shard/composable_apis.h"
#include "nn/hooks/hook_point.h"
#include "testing/expect.h"
#include "testing/fsdp_models/mixture_of_experts.h"
#include "testing/fsdp_models/parity_driver.h"
#include "testing/fsdp_models/run_subtests.h"
#include "testing/fsdp_models/transformer_with_shared_params.h"
#include "testing/run_ranks.h"
#include "tests/reference/dp_mesh.h"
#include "tests/reference/strategies.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

void expect_losses(const std::vector<double>& actual, const std::vector<double>& expected) {
  expect_equal(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    TESSERA_CHECK(ExpectationError, std::abs(actual[i] - expected[i]) <= 1e-5 * std::max(1.0, std::abs(expected[i])),
                  "loss {} is {:.7g}, expected {:.7g}", i, actual[i], expected[i]);
  }
}

/// The losses of three steps, by world size and rank.
struct GoldenLosses {
  const ModelClass& model;
  std::vector<double> alone;
  std::vector<std::vector<double>> of_two;
};

std::vector<GoldenLosses> golden_losses() {
  const std::vector<double> transformer{5.74779, 17.8222, 24.6981};
  return {{nested_wrapped_model(),
           {0.180691, -2.22423, -6.87998},
           {{0.180691, -2.22609, -6.89273}, {0.153004, -2.25724, -6.93392}}},
          {non_uniform_req_grad_model(),
           {0.180691, -1.27848, -4.0509},
           {{0.180691, -1.27803, -4.0496}, {0.153004, -1.30486, -4.07481}}},
          {mixture_of_experts(),
           {0.20889, -4.17792, -13.7087},
           {{0.20889, -3.37866, -11.2083}, {0.318128, -3.00292, -10.3055}}},
          {transformer_with_shared_params(), transformer, {transformer, transformer}}};
}

std::shared_ptr<FSDPTestModel> reference_of(const ModelClass& model, const DeviceMesh& mesh) {
  auto plain = model.init({.mesh = mesh, .deterministic = true});
  if (&model == &mixture_of_experts()) {
    return std::make_shared<DummyDDP>(plain);  // averages by itself
  }
  return std::make_shared<DataParallelReference>(plain, mesh);
}

std::shared_ptr<FSDPTestModel> sharded_of(const ModelClass& model, const DeviceMesh& mesh, bool reshards = true) {
  InitOptions options{.mesh = mesh, .fsdp_init_mode = FSDPInitMode::RECURSIVE, .deterministic = true};
  options.fsdp_options.reshard_after_forward = reshards;
  auto sharded = model.init(options);
  if (&model != &transformer_with_shared_params()) {
    wrap_unit(*sharded, options);
  }
  return sharded;
}

/// Returns the model with every unit under FullyShardedDataParallel.
std::shared_ptr<FSDPTestModel> wrapped_of(const ModelClass& model, Strategy strategy) {
  const InitOptions options{.mesh = mesh_for(strategy),
                            .fsdp_init_mode = FSDPInitMode::RECURSIVE,
                            .wrapper_options = FSDPOptions{.sharding_strategy = strategy},
                            .deterministic = true};
  auto wrapped = model.init(options);
  if (composable_apis(*wrapped).empty()) {
    wrap_unit(*wrapped, options);
  }
  return wrapped;
}

/// Returns the units at and below `model`, of any API.
std::vector<torch::nn::Module*> unit_modules(torch::nn::Module& model) {
  std::vector<torch::nn::Module*> units;
  for (const auto& module : model.modules()) {
    if (!composable_apis(*module).empty()) {
      units.push_back(module.get());
    }
  }
  return units;
}

/// NestedWrappedModule, whose root's gradients are sums where it is wrapped.
ModelClass nested_with_sums() {
  return {"NestedWrappedModule of sums", [](const InitOptions& options) {
            auto model = nested_wrapped_model().init(options);
            if (options.fsdp_init_mode == FSDPInitMode::RECURSIVE) {
              wrap_unit(*model, options);
              fsdp(*model).set_gradient_divide_factor(1);  // too large by the number of ranks
            }
            return model;
          }};
}

const MixedPrecisionPolicy kMixed{.param_dtype = at::kBFloat16};

/// NestedWrappedModule with parameters of this dtype.
std::shared_ptr<FSDPTestModel> sharded_in(at::ScalarType dtype, const MixedPrecisionPolicy& policy) {
  InitOptions options{
      .mesh = dp_mesh(), .fsdp_init_mode = FSDPInitMode::RECURSIVE, .deterministic = true, .dtype = dtype};
  options.fsdp_options.mp_policy = policy;
  auto model = nested_wrapped_model().init(options);
  wrap_unit(*model, options);
  return model;
}

/// A model whose loss is in a dtype of the test's choice.
class OddLoss : public DummyDDP {
 public:
  OddLoss(std::shared_ptr<FSDPTestModel> module, at::ScalarType dtype) : DummyDDP(std::move(module)), dtype_(dtype) {}
  at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) override {
    return DummyDDP::get_loss(input, output).to(dtype_);
  }

 private:
  at::ScalarType dtype_;
};

/// Two equal inputs, and the dtypes in which forward gets them.
class RecordedInputs : public DummyDDP {
 public:
  using DummyDDP::DummyDDP;
  std::vector<at::Tensor> get_input(at::Device device) override {
    const auto input = DummyDDP::get_input(device).at(0);
    return {input, input.clone()};
  }
  at::Tensor forward(std::vector<at::Tensor> inputs) override {
    dtypes = {inputs.at(0).scalar_type(), inputs.at(1).scalar_type()};
    return DummyDDP::forward({inputs.at(0)});
  }

  std::vector<at::ScalarType> dtypes;
};

/// A unit below the root is gathered again after backward.
class UnshardedInnerUnit : public DummyDDP {
 public:
  UnshardedInnerUnit(std::shared_ptr<FSDPTestModel> module, torch::nn::Module& unit)
      : DummyDDP(std::move(module)), unit_(unit) {}
  void run_backward(const at::Tensor& loss) override {
    DummyDDP::run_backward(loss);
    fsdp(unit_).unshard();
  }

 private:
  torch::nn::Module& unit_;
};

/// Every gradient of the last rank is infinite in the first step.
class Overflow : public DummyDDP {
 public:
  using DummyDDP::DummyDDP;
  void run_backward(const at::Tensor& loss) override {
    DummyDDP::run_backward(loss);
    if (step_++ == 0 && get_rank() == get_world_size() - 1) {
      for (const auto& parameter : unique_parameters(*this)) {
        const auto& grad = parameter.grad();
        (is_dtensor(grad) ? to_local(grad) : grad).fill_(std::numeric_limits<float>::infinity());
      }
    }
  }

 private:
  int step_ = 0;
};

}  // namespace

TEST_CASE("row 45: the train loop scales losses; where one rank overflows all skip the step, and the scale halves") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [&](int rank) {
    const auto mesh = dp_mesh();
    const TrainOptions scaled{.num_steps = 4, .grad_scaler = {.init_scale = 1024, .growth_interval = 2}};
    for (const bool is_sharded : {true, false}) {
      const auto model = [&] {
        return is_sharded ? sharded_of(nested_wrapped_model(), mesh) : reference_of(nested_wrapped_model(), mesh);
      };
      const auto plain = train_losses(*model(), {.num_steps = 4});
      expect_losses(train_losses(*model(), {.num_steps = 4, .grad_scaler = {.enabled = false}}), plain);
      expect_losses(train_losses(*model(), scaled),
                    {1024 * plain[0], 1024 * plain[1], 2048 * plain[2], 2048 * plain[3]});
      const auto overflow = std::make_shared<Overflow>(model());
      expect_losses(train_losses(*overflow, scaled),
                    {1024 * plain[0], 512 * plain[0], 512 * plain[1], 1024 * plain[2]});
      // Without the scaler the step is taken: of shards by all ranks, of the plain model by that one.
      const auto unscaled = std::make_shared<Overflow>(model());
      const bool is_hit = is_sharded || rank == world_size - 1;
      expect_equal(std::isfinite(train_losses(*unscaled, {.num_steps = 2})[1]), !is_hit);
    }
    for (const auto* model : {&nested_wrapped_model(), &non_uniform_req_grad_model()}) {
      test_fsdp_parity(*model, {.mesh = mesh, .num_iters = 3, .grad_scaler = {.init_scale = 256}});
    }
  });
}

TEST_CASE("rows 3, 12, 20, 43, 48: the references' losses are Python's, for one rank and two") {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](int rank) {
      for (const auto& golden : golden_losses()) {
        const auto model = reference_of(golden.model, dp_mesh());
        expect_equal(model->children().size(), 1u);
        expect_losses(train_losses(*model, {.num_steps = 3}),
                      world_size == 1 ? golden.alone : golden.of_two[static_cast<size_t>(rank)]);
      }
    });
  }
}

TEST_CASE("rows 3, 12, 18, 23, 49: sharded models' losses are Python's, for one rank and two") {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](int rank) {
      run_subtests({{"model", {0, 1, 2, 3}}, {"reshard_after_forward", {true, false}}}, [&](const Subtest& subtest) {
        const auto golden = golden_losses()[static_cast<size_t>(subtest.get<int64_t>("model"))];
        const auto model = sharded_of(golden.model, dp_mesh(), subtest.get<bool>("reshard_after_forward"));
        expect_losses(train_losses(*model, {.num_steps = 3}),
                      world_size == 1 ? golden.alone : golden.of_two[static_cast<size_t>(rank)]);
      });
    });
  }
}

TEST_CASE("row 43: four ranks: first and third loss of NestedWrappedModule are Python's") {
  run_ranks(4, [](int rank) {
    const auto mesh = dp_mesh();
    const std::vector<double> first{0.180691, 0.153004, 0.0841781, 0.119858};
    const std::vector<double> third{-6.89376, -6.93503, -6.96583, -6.95226};
    const auto own = static_cast<size_t>(rank);
    for (const auto& model : {reference_of(nested_wrapped_model(), mesh), sharded_of(nested_wrapped_model(), mesh)}) {
      const auto losses = train_losses(*model, {.num_steps = 3});
      expect_losses({losses[0], losses[2]}, {first[own], third[own]});
    }
    const auto model = sharded_of(nested_wrapped_model(), mesh);
    expect_losses({train_for_several_steps(*model, {.num_steps = 3}).item<double>()}, {third[own]});
  });
}

TEST_CASE("row 44: the train loop refuses losses of another dtype than the options say") {
  run_ranks(2, [](int) {
    const auto mesh = dp_mesh();
    const auto plain = [&] { return reference_of(nested_wrapped_model(), mesh); };
    const auto odd = [](const std::shared_ptr<FSDPTestModel>& model, at::ScalarType dtype) {
      return std::make_shared<OddLoss>(model, dtype);
    };
    expect_throws<ExpectationError>([&] { train_for_several_steps(*odd(plain(), at::kDouble)); },
                                    "the loss is Double, expected Float");
    expect_throws<ExpectationError>([&] { train_for_several_steps(*odd(plain(), at::kHalf)); },
                                    "the loss is Half, expected Float");

    const auto init = [&](at::ScalarType dtype) {
      InitOptions options{.mesh = mesh, .deterministic = true, .dtype = dtype};
      return nested_wrapped_model().init(options);
    };
    const auto loss = train_for_several_steps(*init(at::kHalf), {.use_pure_fp16 = true});
    TESSERA_EXPECT(loss.scalar_type() == at::kHalf);
    const auto whole = odd(init(at::kHalf), at::kFloat);
    expect_throws<ExpectationError>([&] { train_for_several_steps(*whole, {.use_pure_fp16 = true}); },
                                    "the loss is Float, expected Half");

    const auto mixed = sharded_in(at::kFloat, kMixed);
    expect_throws<ExpectationError>([&] { train_for_several_steps(*mixed); }, "the loss is BFloat16, expected Float");
    const TrainOptions options{.mixed_precision = kMixed};
    TESSERA_EXPECT(train_for_several_steps(*mixed, options).scalar_type() == at::kBFloat16);
    expect_throws<ExpectationError>([&] { train_for_several_steps(*odd(mixed, at::kFloat), options); },
                                    "the loss is Float, expected BFloat16");
    const TrainOptions reference{.autocast = true, .mixed_precision = kMixed};
    TESSERA_EXPECT(train_for_several_steps(*odd(plain(), at::kFloat), reference).scalar_type() == at::kFloat);
    expect_throws<ExpectationError>([&] { train_for_several_steps(*odd(plain(), at::kHalf), reference); },
                                    "the loss is Half, expected Float");
  });
}

TEST_CASE("row 44: the train loop casts all inputs for pure fp16 and for a plain model in mixed precision alone") {
  run_ranks(2, [](int) {
    const auto expect_inputs = [](const std::shared_ptr<FSDPTestModel>& model, at::ScalarType dtype,
                                  const TrainOptions& options) {
      const auto recorded = std::make_shared<RecordedInputs>(model);
      train_for_several_steps(*recorded, options);
      expect_equal(recorded->dtypes == std::vector<at::ScalarType>{dtype, dtype}, true);
    };
    const auto plain_in = [&](at::ScalarType dtype) {
      return nested_wrapped_model().init({.mesh = dp_mesh(), .deterministic = true, .dtype = dtype});
    };
    const TrainOptions pure_fp16{.use_pure_fp16 = true};
    expect_inputs(plain_in(at::kHalf), at::kHalf, pure_fp16);
    expect_inputs(sharded_in(at::kHalf, {}), at::kHalf, pure_fp16);
    expect_inputs(plain_in(at::kFloat), at::kBFloat16, {.autocast = true, .mixed_precision = kMixed});
    expect_inputs(sharded_in(at::kFloat, kMixed), at::kFloat, {.mixed_precision = kMixed});  // its units cast
    expect_inputs(plain_in(at::kFloat), at::kFloat, {});
    expect_inputs(sharded_in(at::kFloat, {}), at::kFloat, {});
  });
}

TEST_CASE("row 46: copying, clearing and loading the model in every step changes no loss") {
  for (const int world_size : {2, 4}) {
    run_ranks(world_size, [](int) {
      for (const auto* model : {&nested_wrapped_model(), &transformer_with_shared_params(), &mixture_of_experts()}) {
        const auto mesh = dp_mesh();
        const auto without = sharded_of(*model, mesh);
        const auto with = sharded_of(*model, mesh);
        expect_losses(train_losses(*with, {.num_steps = 3, .save_model = true}),
                      train_losses(*without, {.num_steps = 3}));
      }
    });
  }
}

TEST_CASE("row 47: training ends with idle, sharded units, also after a throw in forward") {
  run_ranks(2, [](int) {
    const auto model = sharded_of(nested_wrapped_model(), dp_mesh());
    const auto units = unit_modules(*model);
    expect_equal(units.size(), 4u);
    const auto expect_states = [&](ShardedState root, ShardedState first, ShardedState inner, ShardedState last) {
      const ShardedState expected[] = {root, first, inner, last};
      for (size_t i = 0; i < units.size(); ++i) {
        expect_equal(to_string(fsdp(*units[i]).unit_state()), to_string(expected[i]));
      }
    };
    const auto sharded = ShardedState::Sharded, gathering = ShardedState::Unsharding;
    train_for_several_steps(*model);
    expect_states(sharded, sharded, sharded, sharded);
    // In the root's first layer: the next unit is in flight.
    expect_throws<std::exception>([&] { model->forward({at::Tensor()}); }, "undefined Tensor");
    expect_states(sharded, gathering, sharded, sharded);
    fsdp(*model).reset_iter_state();
    expect_states(sharded, sharded, sharded, sharded);
    {  // In the last unit.
      const ScopedHook hook(hook_point(*units.back(), "test").register_forward_pre_hook([&](HookPoint&, TensorRefs) {
        TESSERA_EXPECT(fsdp(*model).unit_state() == ShardedState::Unsharded);
        throw Error("from inside");
      }));
      expect_throws<Error>([&] { model->forward(model->get_input(at::kCPU)); }, "from inside");
    }
    expect_states(sharded, sharded, sharded, sharded);
    train_for_several_steps(*model);
    expect_states(sharded, sharded, sharded, sharded);
    fsdp(*model).set_reshard_after_backward(false);
    expect_throws<Error>([&] { train_for_several_steps(*model); }, "DTensors and plain tensors are mixed");
  });
}

TEST_CASE("row 47: training that ends with an inner unit unsharded is reported") {
  run_ranks(2, [](int) {
    const auto model = sharded_of(non_uniform_req_grad_model(), dp_mesh());
    auto* frozen = unit_modules(*model).at(1);  // the optimizer does not look at its parameters
    const auto unsharded = std::make_shared<UnshardedInnerUnit>(model, *frozen);
    expect_throws<ExpectationError>([&] { train_for_several_steps(*unsharded); }, "ends Unsharded, expected Sharded");
    fsdp(*frozen).reshard();
    train_for_several_steps(*model);
  });
}

TEST_CASE("rows 12, 18, 23, 49: under FullyShardedDataParallel models' losses are Python's, with every strategy") {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](int rank) {
      run_subtests({{"model", {0, 1, 2, 3}}, {"strategy", {0, 1, 2, 3, 4}}}, [&](const Subtest& subtest) {
        const auto golden = golden_losses()[static_cast<size_t>(subtest.get<int64_t>("model"))];
        const auto strategy = kAllStrategies[subtest.get<int64_t>("strategy")];
        const auto model = wrapped_of(golden.model, strategy);
        const auto units = FSDP::fsdp_modules(*model);
        expect_equal(units.size(), unit_modules(*model).size());
        for (const auto& unit : units) {
          const bool is_hybrid = unit.device_mesh().ndim() == 2;
          const bool is_alone = !is_hybrid && unit.device_mesh().size() == 1;  // on one rank, or an expert
          TESSERA_EXPECT(unit.sharding_strategy() == (is_alone ? Strategy::NO_SHARD : strategy));
        }
        expect_losses(train_losses(*model, {.num_steps = 3}),
                      world_size == 1 ? golden.alone : golden.of_two[static_cast<size_t>(rank)]);
      });
    });
  }
}

TEST_CASE("rows 49, 51: the parity driver passes for every model, device mode and strategy") {
  const std::vector<const ModelClass*> models{&nested_wrapped_model(), &always_wrap_nested_wrapped_model(),
                                              &non_uniform_req_grad_model(), &transformer_with_shared_params(),
                                              &mixture_of_experts()};
  for (const int world_size : {2, 4}) {
    // On the CPU the device modes are one. The last strategy is fully_shard.
    const std::vector<SubtestAxis> axes{
        {"model", {0, 1, 2, 3, 4}},
        {"device", world_size == 2 ? std::vector<SubtestValue>{0, 1, 2} : std::vector<SubtestValue>{0}},
        {"strategy", {0, 1, 2, 3, 4, 5}}};
    run_ranks(world_size, [&](int) {
      run_subtests(axes, [&](const Subtest& subtest) {
        const auto* model = models[static_cast<size_t>(subtest.get<int64_t>("model"))];
        FSDPParityOptions options{.mesh = dp_mesh()};
        options.device_init_mode = static_cast<DEVICEInitMode>(subtest.get<int64_t>("device"));
        if (const int64_t strategy = subtest.get<int64_t>("strategy"); strategy < 5) {
          options.mesh = mesh_for(kAllStrategies[strategy]);
          options.wrapper_options = FSDPOptions{.sharding_strategy = kAllStrategies[strategy]};
        }
        if (model == &mixture_of_experts()) {
          options.ref_init_fn = [](std::shared_ptr<FSDPTestModel> plain) { return std::make_shared<DummyDDP>(plain); };
        }
        test_fsdp_parity(*model, options);
      });
    });
  }
}

TEST_CASE("row 49: the parity driver with mixed precision, HSDP and float16") {
  run_ranks(4, [](int) {
    const auto hsdp = init_device_mesh(at::kCPU, {2, 2}, {"replicas", "shards"});
    test_fsdp_parity(nested_wrapped_model(), {.mesh = hsdp});
    FSDPParityOptions mixed{.mesh = dp_mesh()};
    mixed.fsdp_options.mp_policy = {.param_dtype = at::kBFloat16};
    test_fsdp_parity(nested_wrapped_model(), mixed);
    test_fsdp_parity(nested_wrapped_model(), {.mesh = dp_mesh(), .use_pure_fp16 = true});
    FSDPParityOptions wrapped{.mesh = dp_mesh(), .use_pure_fp16 = true};
    wrapped.wrapper_options = FSDPOptions();
    test_fsdp_parity(nested_wrapped_model(), wrapped);
    wrapped.use_pure_fp16 = false;
    wrapped.wrapper_options->mixed_precision.param_dtype = at::kBFloat16;
    test_fsdp_parity(nested_wrapped_model(), wrapped);
  });
}

TEST_CASE("row 50: a model that is cast after sharding cannot train, and says why") {
  run_ranks(2, [](int) {
    const auto model = sharded_of(nested_wrapped_model(), dp_mesh());
    model->to(at::kDouble);
    expect_throws<StateError>([&] { train_for_several_steps(*model); }, "were replaced after fully_shard took it");
  });
}

TEST_CASE("rows 48, 51: the parity driver refuses NO_FSDP, names a model that fails, and finds a wrong scale") {
  run_ranks(2, [](int) {
    const auto mesh = dp_mesh();
    expect_throws<ValueError>(
        [&] { test_fsdp_parity(nested_wrapped_model(), {.mesh = mesh, .fsdp_init_mode = FSDPInitMode::NO_FSDP}); },
        "NO_FSDP");
    FSDPParityOptions broken{.mesh = mesh};
    broken.shard = [](torch::nn::Module&, const FullyShardOptions&) { throw Error("a cause"); };
    expect_throws<ValueError>([&] { test_fsdp_parity(nested_wrapped_model(), broken); },
                              "NestedWrappedModule cannot be built: a cause");
    FSDPParityOptions sums{.mesh = mesh};
    sums.shard = [](torch::nn::Module& module, const FullyShardOptions& options) {
      fully_shard(module, options);
      fsdp(module).set_gradient_divide_factor(1);  // gradients are sums: too large by the number of ranks
    };
    expect_throws<ExpectationError>([&] { test_fsdp_parity(nested_wrapped_model(), sums); }, "differ");
    for (const auto strategy : kAllStrategies) {
      FSDPParityOptions wrapped{.mesh = mesh_for(strategy)};
      wrapped.wrapper_options = FSDPOptions{.sharding_strategy = strategy};
      expect_throws<ExpectationError>([&] { test_fsdp_parity(nested_with_sums(), wrapped); }, "differ");
    }
  });
}

}  // namespace tessera::testing
