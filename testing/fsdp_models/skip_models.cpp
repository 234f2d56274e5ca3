#include "testing/fsdp_models/skip_models.h"

namespace tessera::testing {

namespace {

tessera::nn::Linear linear_without_bias() {
  return tessera::nn::Linear(torch::nn::LinearOptions(10, 10).bias(false));
}

}  // namespace

SkipModuleImpl::SkipModuleImpl() : lin(register_module("lin", linear_without_bias())) {}

NestedLinearImpl::NestedLinearImpl(bool fsdp_wrap) {
  const auto layer = linear_without_bias();
  nested_linear = register_module("nested_linear", fsdp_wrap ? wrap(layer) : layer);
}

SkipModelImpl::SkipModelImpl(bool double_nest, at::Device device) {
  linear = register_module("linear", linear_without_bias());
  linear_skip = register_module("linear_skip", SkipModule());
  const auto set_device = [&](FSDPOptions& options) { options.device_id = device; };
  nested_linear = register_module("nested_linear", wrap(NestedLinear(double_nest), set_device));
}

}  // namespace tessera::testing
