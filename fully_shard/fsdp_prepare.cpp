#include "fully_shard/fsdp_prepare.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "base/error.h"
#include "comm/collectives.h"
#include "fully_shard/replace_data.h"

namespace tessera {

namespace {

using torch::nn::Module;

/// Parameters and buffers of the module itself.
std::vector<at::Tensor> own_tensors(const Module& module) {
  auto tensors = module.parameters(/*recurse=*/false);
  for (const auto& buffer : module.buffers(/*recurse=*/false)) {
    tensors.push_back(buffer);
  }
  return tensors;
}

/// Gives tensors on the meta device memory, and lets the user's function fill it, once a module.
void materialize(Module& module, const FSDPOptions& options) {
  const at::NoGradGuard no_grad;
  const auto device = options.device_id.value_or(at::kCPU);
  bool any = false;
  for (const auto& tensor : own_tensors(module)) {
    if (tensor.defined() && tensor.is_meta()) {
      replace_data(tensor, at::empty_like(tensor, tensor.options().requires_grad(false).device(device)));
      any = true;
    }
  }
  if (any) {
    options.param_init_fn(module);
  }
}

/// To device_id; parameters that are offloaded stay on the CPU.
void move(const Module& module, const FSDPOptions& options) {
  const at::NoGradGuard no_grad;
  const auto move_all = [&](const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) {
      if (tensor.defined() && tensor.device() != *options.device_id) {
        replace_data(tensor, tensor.detach().to(*options.device_id));
      }
    }
  };
  if (!options.cpu_offload.offload_params) {
    move_all(module.parameters(/*recurse=*/false));
  }
  move_all(module.buffers(/*recurse=*/false));
}

bool has_meta(const Module& module) {
  const auto tensors = own_tensors(module);
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const auto& tensor) { return tensor.defined() && tensor.is_meta(); });
}

}  // namespace

void prepare_modules(const std::vector<ManagedModule>& modules, const FSDPOptions& options, const std::string& where) {
  for (const auto& [name, module] : modules) {
    TESSERA_CHECK(ValueError, !has_meta(*module) || options.param_init_fn,
                  "{}: '{}' ({}) is on the meta device; give param_init_fn, which fills the tensors of one module",
                  where, name, module->name());
    for (const auto& parameter : module->named_parameters(/*recurse=*/false)) {
      const auto device = parameter.value().device();
      TESSERA_CHECK(
          ValueError, !options.device_id || device.is_cpu() || device.is_meta() || device == *options.device_id,
          "{}: '{}' is on {}, but device_id is {}; move the module there, or to the CPU, before wrapping", where,
          name.empty() ? parameter.key() : name + "." + parameter.key(), device.str(), options.device_id->str());
    }
  }
  for (const auto& [name, module] : modules) {
    if (options.param_init_fn) {
      materialize(*module, options);
    }
    if (options.device_id) {
      move(*module, options);
    }
  }
}

void sync_states(const std::vector<ManagedModule>& modules, const WrapScope& scope, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const auto sync = [&](const at::Tensor& tensor) {
    for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
      if (mesh.size(axis) > 1) {
        broadcast(tensor.detach(), 0, mesh.group(axis));
      }
    }
  };
  for (const auto& [name, module] : modules) {
    for (const auto& parameter : module->parameters(/*recurse=*/false)) {
      if (scope.ignored_params.count(parameter.unsafeGetTensorImpl()) == 0) {
        sync(parameter);
      }
    }
    for (const auto& buffer : module->buffers(/*recurse=*/false)) {
      sync(buffer);
    }
  }
}

void cast_buffers(const std::vector<ManagedModule>& modules, FSDPUnit& unit) {
  const auto dtype = unit.options.mixed_precision.buffer_dtype;
  for (const auto& [name, module] : modules) {
    for (auto& buffer : module->buffers(/*recurse=*/false)) {
      if (dtype && buffer.is_floating_point() && buffer.scalar_type() != *dtype) {
        unit.cast_buffers.push_back({buffer, buffer.scalar_type()});
        buffer.set_data(buffer.to(*dtype));
      }
    }
  }
}

}  // namespace tessera
