// FSDP::to and its kin.

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "fsdp1/fsdp.h"
#include "fsdp1/wrapper_state.h"
#include "fully_shard/engine/unit_tree.h"
#include "fully_shard/memory/replace_data.h"

namespace tessera {

namespace {

using torch::nn::Module;

/// Units at and below `module`, those of fully_shard and replicate too, that have parameters.
std::vector<std::shared_ptr<FSDPState>> units_with_params(Module& module) {
  std::vector<std::shared_ptr<FSDPState>> units;
  for (const auto& [path, state] : fsdp_states(module)) {
    if (state->group()) {
      units.push_back(state);
    }
  }
  return units;
}

/// Buffers, and parameters of no unit; a unit that is gathered has plain ones too.
std::vector<at::Tensor> not_sharded(const Module& module, const std::vector<std::shared_ptr<FSDPState>>& units) {
  std::unordered_set<c10::TensorImpl*> managed;
  for (const auto& state : units) {
    for (const auto& param : state->group()->params()) {
      managed.insert(param.param().unsafeGetTensorImpl());
    }
  }
  std::vector<at::Tensor> tensors;
  const auto add = [&](const std::vector<at::Tensor>& candidates) {
    for (const auto& tensor : candidates) {
      if (tensor.defined() && !is_dtensor(tensor) && managed.insert(tensor.unsafeGetTensorImpl()).second) {
        tensors.push_back(tensor);
      }
    }
  };
  add(module.buffers());
  add(module.parameters());
  return tensors;
}

void replace_by(const at::Tensor& tensor, const at::Tensor& converted) {
  if (!converted.is_same(tensor)) {
    replace_data(tensor, converted);
  }
}

}  // namespace

void FSDP::to(at::Device device) const {
  unit_->assert_state("to", {TrainingState::IDLE});
  const auto units = units_with_params(*module_);
  for (const auto& state : units) {
    const auto belongs = state->group()->shard_device();
    TESSERA_CHECK(ValueError,
                  device.type() == belongs.type() && (!device.has_index() || device == belongs || device.is_cpu()),
                  "to: the shards of {} are on {}, and cannot go to {}: their mesh communicates there. Move the module "
                  "before it is wrapped, or wrap it with device_id = {} and a mesh on that device",
                  state->label(), belongs.str(), device.str(), device.str());
  }
  const at::NoGradGuard no_grad;
  for (const auto& tensor : not_sharded(*module_, units)) {
    replace_by(tensor, tensor.detach().to(device));
  }
}

void FSDP::to(at::ScalarType dtype) const {
  unit_->assert_state("to", {TrainingState::IDLE});
  TESSERA_CHECK(ValueError, c10::isFloatingType(dtype),
                "to: {} is no floating dtype; buffers of other dtypes stay as "
                "they are, so convert those one by one",
                toString(dtype));
  const auto units = units_with_params(*module_);
  for (const auto& state : units) {
    for (const auto& param : state->group()->params()) {
      TESSERA_CHECK(NotImplementedError, param.dtype() == dtype || !c10::isFloatingType(param.dtype()),
                    "to: parameter '{}' of {} is sharded in {}, and cannot become {}. Convert the module before it is "
                    "wrapped, or let it compute in {} with mixed_precision.param_dtype, which keeps the shards",
                    param.origin().name, param.origin().module, toString(param.dtype()), toString(dtype),
                    toString(dtype));
    }
  }
  const at::NoGradGuard no_grad;
  for (const auto& tensor : not_sharded(*module_, units)) {
    if (tensor.is_floating_point()) {
      replace_by(tensor, tensor.detach().to(dtype));
    }
  }
}

void FSDP::cuda() const {
  to(at::kCUDA);
}

void FSDP::cpu() const {
  to(at::kCPU);
}

}  // namespace tessera
