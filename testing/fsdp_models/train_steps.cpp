#include "testing/fsdp_models/train_steps.h"

#include <ATen/autocast_mode.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <set>

#include "dtensor/dtensor.h"
#include "fully_shard/composable_apis.h"
#include "testing/expect.h"
#include "testing/fsdp_models/module_states.h"

namespace tessera::testing {

namespace {

class AutocastScope {
 public:
  AutocastScope(at::DeviceType device, bool enabled, at::ScalarType dtype)
      : device_(device), was_enabled_(at::autocast::is_autocast_enabled(device)) {
    at::autocast::set_autocast_dtype(device, dtype);
    at::autocast::set_autocast_enabled(device, enabled);
  }
  ~AutocastScope() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, was_enabled_);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  at::DeviceType device_;
  bool was_enabled_;
};

std::optional<at::ScalarType> input_dtype(bool is_sharded, const TrainOptions& options) {
  if (options.use_pure_fp16) {
    return at::kHalf;
  }
  return options.mixed_precision && !is_sharded ? options.mixed_precision->param_dtype : std::nullopt;
}

void check_loss_dtype(const at::Tensor& loss, bool is_sharded, const TrainOptions& options) {
  std::vector<at::ScalarType> allowed{at::kFloat};
  if (options.use_pure_fp16) {
    allowed = {at::kHalf};
  } else if (options.mixed_precision && is_sharded) {
    allowed = {options.mixed_precision->param_dtype.value_or(at::kFloat)};
  } else if (options.autocast) {
    allowed.push_back(
        options.mixed_precision->param_dtype.value_or(at::kFloat));  // if autocast keeps low-precision sums
  }
  TESSERA_CHECK(ExpectationError, std::find(allowed.begin(), allowed.end(), loss.scalar_type()) != allowed.end(),
                "train_for_several_steps: the loss is {}, expected {}", c10::toString(loss.scalar_type()),
                c10::toString(allowed[0]));
}

/// Adds the modules at and below `module` whose parameters belong to units that are not inside another one.
void add_modules_of_outermost(torch::nn::Module& module, std::set<const torch::nn::Module*>& modules) {
  if (!composable_apis(module).empty()) {
    const auto managed = managed_modules(module);
    modules.insert(managed.begin(), managed.end());
    return;
  }
  for (const auto& child : module.children()) {
    add_modules_of_outermost(*child, modules);
  }
}

/// Between uses, offloaded parameters are shards on the CPU. After forward the outermost unit may hold full ones.
void check_offloaded(torch::nn::Module& model, std::string_view when, bool outermost_may_keep) {
  std::set<const torch::nn::Module*> outermost;
  add_modules_of_outermost(model, outermost);
  for (const auto& module : model.named_modules()) {
    for (const auto& item : module.value()->named_parameters(/*recurse=*/false)) {
      const auto& parameter = item.value();
      const bool is_kept = outermost_may_keep && !is_dtensor(parameter) && outermost.contains(module.value().get());
      TESSERA_CHECK(ExpectationError, is_kept || parameter.device().is_cpu(),
                    "train_for_several_steps: after {} '{}' of {} is on {}, expected cpu, where it is offloaded to",
                    when, item.key(), module.key().empty() ? "the model" : module.key(), parameter.device().str());
    }
  }
}

at::Tensor compute_loss(FSDPTestModel& model, bool is_sharded, const TrainOptions& options) {
  const auto parameter_device = model.parameters().at(0).device();
  const auto device = options.device.value_or(parameter_device);
  const auto dtype =
      options.mixed_precision ? options.mixed_precision->param_dtype.value_or(at::kBFloat16) : at::kFloat;
  const AutocastScope autocast(device.type(), options.autocast, options.autocast ? dtype : at::kBFloat16);
  auto input = model.get_input(device);
  if (const auto cast = input_dtype(is_sharded, options)) {
    for (auto& tensor : input) {
      tensor = tensor.to(*cast);
    }
  }
  const auto output = model.forward(input);
  if (is_sharded && options.cpu_offload && options.reshard_after_forward) {
    check_offloaded(model, "forward", /*outermost_may_keep=*/true);
  }
  return model.get_loss(input, output).to(parameter_device);
}

void save_and_load(FSDPTestModel& model) {
  const auto saved = clone_state_dict(get_state_dict(model));
  zero_model(model, {.zero_buffers = true});
  load_state_dict(model, saved);
}

void check_idle(torch::nn::Module& model) {
  for (const auto& module : model.modules()) {
    if (!composable_apis(*module).empty()) {
      TESSERA_CHECK(ExpectationError, fsdp(*module).unit_state() == ShardedState::Sharded,
                    "train_for_several_steps: {} ends {}, expected Sharded", module->name(),
                    to_string(fsdp(*module).unit_state()));
    }
  }
  if (!composable_apis(model).empty()) {
    fsdp(model).check_ready_for_step();
  }
}

}  // namespace

bool is_sharded_model(torch::nn::Module& model) {
  for (const auto& module : model.modules()) {
    if (!composable_apis(*module).empty()) {
      return true;
    }
  }
  return false;
}

namespace {

std::vector<at::Tensor> train(FSDPTestModel& model, const TrainOptions& options) {
  const bool is_sharded = is_sharded_model(model);
  const auto parameters = unique_parameters(model);
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(options.lr).momentum(0.9));
  ShardedGradScaler scaler(options.grad_scaler);
  std::vector<at::Tensor> losses;
  for (int step = 0; step < options.num_steps; ++step) {
    optimizer.zero_grad();
    const auto loss = scaler.scale(compute_loss(model, is_sharded, options));
    check_loss_dtype(loss, is_sharded, options);
    model.run_backward(loss);
    if (is_sharded && options.cpu_offload) {
      check_offloaded(model, "backward", /*outermost_may_keep=*/false);
    }
    scaler.step(optimizer);
    scaler.update();
    if (options.save_model) {
      save_and_load(model);
    }
    losses.push_back(loss.detach());
  }
  if (is_sharded) {
    check_idle(model);
  }
  return losses;
}

}  // namespace

at::Tensor train_for_several_steps(FSDPTestModel& model, const TrainOptions& options) {
  return train(model, options).back();
}

std::vector<double> train_losses(FSDPTestModel& model, const TrainOptions& options) {
  std::vector<double> losses;
  for (const auto& loss : train(model, options)) {
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace tessera::testing
