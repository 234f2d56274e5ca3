#include "dtensor/local/parameter_origin.h"

#include <torch/csrc/autograd/variable.h>

#include "dtensor/local/dtensor_impl.h"

namespace tessera {

const UnitParameterHook* unit_parameter_hook(const at::Tensor& param) {
  if (!param.defined() || !torch::autograd::impl::get_autograd_meta(param)) {
    return nullptr;
  }
  return dynamic_cast<const UnitParameterHook*>(torch::autograd::impl::post_acc_grad_hooks(param).get());
}

bool belongs_to_unit(const at::Tensor& param) {
  const auto* meta = param.defined() ? dtensor_meta(param) : nullptr;
  const auto* hook = unit_parameter_hook(param);
  return (meta && meta->origin) || (hook && hook->has_live_unit());
}

}  // namespace tessera
