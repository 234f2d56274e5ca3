#pragma once
// Tells which unit of data parallelism a parameter belongs to, given only the tensor.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <string>

namespace tessera {

/// Unit that sharded a parameter. Errors name it if an op gets the parameter where it should be unsharded.
struct ParameterOrigin {
  std::string name;    // "blocks.0.wq.weight"
  std::string module;  // "blocks.0 (Block)": the unit that unshards it
};

/// Hook that notifies a unit of a parameter's gradient. It also marks plain parameters as the unit's.
struct UnitParameterHook : torch::autograd::PostAccumulateGradHook {
  virtual bool has_live_unit() const = 0;
};

/// Returns the unit's hook on `param`; null without one, or if undefined.
const UnitParameterHook* unit_parameter_hook(const at::Tensor& param);

/// Returns whether `param` belongs to a living unit, sharded or not.
bool belongs_to_unit(const at::Tensor& param);

}  // namespace tessera
