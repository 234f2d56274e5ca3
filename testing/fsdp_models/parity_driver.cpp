#include "testing/fsdp_models/parity_driver.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>

#include "comm/collectives.h"
#include "fully_shard/composable_apis.h"
#include "testing/expect.h"
#include "testing/fsdp_models/module_states.h"

namespace tessera::testing {

namespace {

constexpr Tolerance kLowPrecision{.rtol = 2e-2, .atol = 2e-2};

MixedPrecisionPolicy make_policy(const FSDPParityOptions& options) {
  if (!options.wrapper_options) {
    return options.fsdp_options.mp_policy;
  }
  const auto& precision = options.wrapper_options->mixed_precision;
  return {.param_dtype = precision.param_dtype, .reduce_dtype = precision.reduce_dtype};
}

/// Returns whether units free their parameters after forward, if the options say so.
std::optional<bool> reshards_after_forward(const FSDPParityOptions& options) {
  if (options.wrapper_options) {
    const auto strategy = options.wrapper_options->sharding_strategy.value_or(ShardingStrategy::FULL_SHARD);
    return strategy == ShardingStrategy::FULL_SHARD || strategy == ShardingStrategy::HYBRID_SHARD;
  }
  const auto& reshards = options.fsdp_options.reshard_after_forward;
  return reshards ? std::optional(reshards->is_on()) : std::nullopt;
}

bool is_offloaded(const FSDPParityOptions& options) {
  return options.wrapper_options ? options.wrapper_options->cpu_offload.offload_params
                                 : options.fsdp_options.offload_policy.has_value();
}

/// Returns whether anything is computed or sent in less than float32.
bool is_mixed(const FSDPParityOptions& options) {
  const auto is_low = [](std::optional<at::ScalarType> dtype) {
    return dtype && c10::elementSize(*dtype) < c10::elementSize(at::kFloat);
  };
  const auto policy = make_policy(options);
  return is_low(policy.param_dtype) || is_low(policy.reduce_dtype);
}

InitOptions common_init(const FSDPParityOptions& options) {
  auto init = options.init_options;
  init.mesh = options.mesh;
  init.deterministic = true;
  if (options.use_pure_fp16) {
    init.dtype = at::kHalf;
  }
  return init;
}

TrainOptions common_train(const FSDPParityOptions& options) {
  TrainOptions train{.num_steps = options.num_iters,
                     .lr = options.lr,
                     .use_pure_fp16 = options.use_pure_fp16,
                     .cpu_offload = is_offloaded(options),
                     .device = options.init_options.device,
                     .grad_scaler = options.grad_scaler};
  train.reshard_after_forward = reshards_after_forward(options).value_or(true);
  if (is_mixed(options)) {
    train.mixed_precision = make_policy(options);
  }
  return train;
}

std::shared_ptr<FSDPTestModel> make_reference(const ModelClass& model_class, const FSDPParityOptions& options) {
  auto init = common_init(options);
  init.fsdp_init_mode = FSDPInitMode::NO_FSDP;
  init.device_init_mode = DEVICEInitMode::DEVICE_BEFORE;
  auto plain = model_class.init(init);
  return options.ref_init_fn ? options.ref_init_fn(plain)
                             : std::make_shared<DataParallelReference>(plain, options.mesh);
}

/// Makes the top a unit too, whether or not the model's own init made it one.
std::shared_ptr<FSDPTestModel> make_sharded(const ModelClass& model_class, const FSDPParityOptions& options) {
  auto init = common_init(options);
  init.fsdp_init_mode = options.fsdp_init_mode;
  init.device_init_mode = options.device_init_mode;
  init.fsdp_options = options.fsdp_options;
  init.shard = options.shard;
  init.wrapper_options = options.wrapper_options;
  try {
    auto model = model_class.init(init);
    if (composable_apis(*model).empty()) {
      wrap_unit(*model, init);
    }
    if (options.device_init_mode == DEVICEInitMode::DEVICE_AFTER) {
      model->to(init.device);
    }
    return model;
  } catch (const std::exception& cause) {
    throw ValueError(fmt::format("test_fsdp_parity: {} cannot be built: {}", model_class.name, cause.what()));
  }
}

void compare_parameters(torch::nn::Module& reference, torch::nn::Module& sharded, bool on_cpu, Tolerance tolerance) {
  const auto expected = get_full_params(reference);
  const auto actual = get_full_params(sharded);
  expect_equal(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto device = on_cpu ? at::Device(at::kCPU) : expected[i].device();
    TESSERA_EXPECT(actual[i].device() == device);
    expect_close(actual[i], expected[i].to(device), tolerance);
  }
}

}  // namespace

void DataParallelReference::run_backward(const at::Tensor& loss) {
  const at::NoGradGuard no_grad;
  {
    const at::AutoGradMode with_grad(true);
    DummyDDP::run_backward(loss);
  }
  for (auto& parameter : unique_parameters(*this)) {
    if (!parameter.grad().defined()) {
      continue;
    }
    auto& grad = parameter.mutable_grad();
    for (int64_t axis = mesh_.ndim() - 1; axis >= 0; --axis) {
      all_reduce(grad, ReduceOp::Avg, mesh_.group(axis));
    }
  }
}

void test_fsdp_parity(const ModelClass& model_class, const FSDPParityOptions& options) {
  TESSERA_CHECK(ValueError, options.fsdp_init_mode != FSDPInitMode::NO_FSDP,
                "test_fsdp_parity: fsdp_init_mode is NO_FSDP, so nothing would be compared; use RECURSIVE");
  const auto reference = make_reference(model_class, options);
  auto train = common_train(options);
  train.autocast = is_mixed(options);
  const auto expected = train_for_several_steps(*reference, train);
  const auto sharded = make_sharded(model_class, options);
  train.autocast = false;
  train.save_model = options.save_model;
  const auto actual = train_for_several_steps(*sharded, train);
  TESSERA_CHECK(ExpectationError, at::isfinite(expected).all().item<bool>(),
                "test_fsdp_parity: the reference's loss is {}: it diverged, and nothing can be compared with it",
                expected.item<double>());
  const bool is_low = is_mixed(options) || options.use_pure_fp16;
  expect_close(actual.to(expected.device(), at::kFloat), expected.to(at::kFloat),
               is_low ? kLowPrecision : options.tolerance);
  if (!is_low) {
    compare_parameters(*reference, *sharded, train.cpu_offload, options.tolerance);
  }
}

}  // namespace tessera::testing
