#pragma once
// Which unit of data parallelism a parameter belongs to, for those who only know the tensor.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <string>

namespace tessera {

/// Why a parameter is a DTensor: which unit sharded it. Errors name it when an op meets the parameter where
/// it should have been unsharded.
struct ParameterOrigin {
  std::string name;    // "blocks.0.wq.weight"
  std::string module;  // "blocks.0 (Block)": the unit whose hooks unshard it
};

/// The hook by which a unit learns of a parameter's gradient. It marks the parameter as the unit's also while that is a
/// plain tensor.
struct UnitParameterHook : torch::autograd::PostAccumulateGradHook {
  virtual bool has_live_unit() const = 0;
};

/// The unit's hook on `param`; null where there is none, also for an undefined tensor.
const UnitParameterHook* unit_parameter_hook(const at::Tensor& param);

/// Returns true for a parameter of a living unit, sharded or not.
bool belongs_to_unit(const at::Tensor& param);

}  // namespace tessera
