#include "testing/fsdp_models/module_with_delay.h"

#include <chrono>
#include <thread>

#include "testing/fsdp_models/mixture_of_experts.h"
#include "testing/fsdp_models/nested_wrapped_models.h"
#include "testing/fsdp_models/patches.h"

namespace tessera::testing {

void delay(double milliseconds) {
  if (milliseconds > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds));
  }
}

ModuleWithDelayImpl::ModuleWithDelayImpl(std::shared_ptr<FSDPTestModel> module, Delays delays)
    : DummyDDP(std::move(module)), delays_(delays) {}

at::Tensor ModuleWithDelayImpl::forward(std::vector<at::Tensor> inputs) {
  if (delays_.before_free <= 0) {
    return DummyDDP::forward(std::move(inputs));
  }
  const auto patch = patch_reshard([this](const UnitCall& call) {
    delay(delays_.before_free);
    call.run();
  });
  return DummyDDP::forward(std::move(inputs));
}

at::Tensor ModuleWithDelayImpl::get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) {
  auto loss = DummyDDP::get_loss(input, output);
  delay(delays_.after_loss);
  return loss;
}

void ModuleWithDelayImpl::run_backward(const at::Tensor& loss) {
  const auto patch = patch_reduce_scatter([this](const ReduceScatterFn& original, const at::Tensor& output,
                                                 const at::Tensor& input, ReduceOp op, const ProcessGroupPtr& group) {
    delay(delays_.before_reduction);
    return original(output, input, op, group);
  });
  DummyDDP::run_backward(loss);
}

ModelClass nested_wrapped_model_with_delay(Delays delays) {
  return {"NestedWrappedModuleWithDelay", [delays](const InitOptions& options) -> std::shared_ptr<FSDPTestModel> {
            return ModuleWithDelay(nested_wrapped_model().init(options), delays).ptr();
          }};
}

ModelClass mixture_of_experts_with_delay(double before_free) {
  return {"MixtureOfExpertsWithDelay", [before_free](const InitOptions& options) -> std::shared_ptr<FSDPTestModel> {
            const bool is_wrapped = options.fsdp_init_mode == FSDPInitMode::RECURSIVE;
            const Delays delays{.before_free = is_wrapped ? before_free : 0};
            return ModuleWithDelay(mixture_of_experts().init(options), delays).ptr();
          }};
}

InitOptions delayed_init_options(DeviceMesh mesh) {
  return {.mesh = std::move(mesh), .device_init_mode = DEVICEInitMode::DEVICE_AFTER};
}

}  // namespace tessera::testing
