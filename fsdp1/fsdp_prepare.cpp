#include "fsdp1/fsdp_prepare.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "base/error.h"
#include "comm/collectives.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/tensor_memory.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

using torch::nn::Module;

std::vector<at::Tensor> without_ignored(std::vector<at::Tensor> tensors, const WrapScope& scope) {
  std::erase_if(tensors, [&](const at::Tensor& tensor) {
    return !tensor.defined() || scope.ignored_params.contains(tensor.unsafeGetTensorImpl());
  });
  return tensors;
}

/// Returns the module's own parameters; all functions here exclude children.
std::vector<at::Tensor> own_parameters(const Module& module, const WrapScope& scope) {
  return without_ignored(module.parameters(/*recurse=*/false), scope);
}

std::vector<at::Tensor> own_buffers(const Module& module, const WrapScope& scope) {
  return without_ignored(module.buffers(/*recurse=*/false), scope);
}

std::vector<at::Tensor> own_tensors(const Module& module, const WrapScope& scope) {
  auto tensors = own_parameters(module, scope);
  for (auto& buffer : own_buffers(module, scope)) {
    tensors.push_back(std::move(buffer));
  }
  return tensors;
}

/// Allocates tensors on the meta device, and lets the user's function initialize them, once per module.
void materialize(Module& module, const WrapScope& scope, const FSDPOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Device device = options.device_id.value_or(at::kCPU);
  bool any = false;
  for (const auto& tensor : own_tensors(module, scope)) {
    if (tensor.is_meta()) {
      replace_data(tensor, at::empty_like(tensor, tensor.options().requires_grad(false).device(device)));
      any = true;
    }
  }
  if (any) {
    options.param_init_fn(module);
  }
}

/// Moves the module to device_id; offloaded parameters stay on the CPU.
void move(const Module& module, const WrapScope& scope, const FSDPOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Device device = *options.device_id;
  for (const auto& tensor :
       options.cpu_offload.offload_params ? own_buffers(module, scope) : own_tensors(module, scope)) {
    if (tensor.device() != device) {
      replace_data(tensor, tensor.detach().to(device));
    }
  }
}

bool has_meta(const Module& module, const WrapScope& scope) {
  const auto tensors = own_tensors(module, scope);
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return tensor.is_meta(); });
}

void check_module(const ManagedModule& managed, const WrapScope& scope, const FSDPOptions& options,
                  const std::string& where) {
  const auto& [name, module] = managed;
  TESSERA_CHECK(ValueError, !has_meta(*module, scope) || options.param_init_fn,
                "{}: '{}' ({}) is on the meta device; give param_init_fn, which fills the tensors of one module", where,
                name, module_type_name(*module));
  for (const auto& parameter : module->named_parameters(/*recurse=*/false)) {
    const auto device = parameter.value().device();
    const bool is_ignored = scope.ignored_params.contains(parameter.value().unsafeGetTensorImpl());
    TESSERA_CHECK(
        ValueError,
        is_ignored || !options.device_id || device.is_cpu() || device.is_meta() || device == *options.device_id,
        "{}: '{}' is on {}, but device_id is {}; move the module there, or to the CPU, before wrapping", where,
        name.empty() ? parameter.key() : name + "." + parameter.key(), device.str(),
        at::Device(*options.device_id).str());
  }
}

}  // namespace

std::vector<ManagedModule> modules_to_prepare(Module& module, const WrapScope& scope) {
  auto modules = named_managed_modules(module);
  std::erase_if(modules, [&](const ManagedModule& own) { return scope.ignored_modules.contains(own.module); });
  return modules;
}

void prepare_modules(const std::vector<ManagedModule>& modules, const WrapScope& scope, const FSDPOptions& options,
                     const std::string& where) {
  for (const auto& managed : modules) {
    check_module(managed, scope, options, where);
  }
  for (const auto& [name, module] : modules) {
    if (options.param_init_fn) {
      materialize(*module, scope, options);
    }
    if (options.device_id) {
      move(*module, scope, options);
    }
  }
}

void sync_states(const std::vector<ManagedModule>& modules, const WrapScope& scope, const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const auto sync = [&](const at::Tensor& tensor) {
    const auto* meta = dtensor_meta(tensor);  // for a tensor-parallel one, the mesh's rank 0 has the same local part
    const auto own = meta ? meta->local : tensor.detach();
    const auto sent = own.contiguous();
    for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
      if (mesh.size(axis) > 1) {
        broadcast(sent, 0, mesh.group(axis));
      }
    }
    if (!sent.is_alias_of(own)) {
      own.copy_(sent);
    }
  };
  for (const auto& [name, module] : modules) {
    for (const auto& tensor : own_tensors(*module, scope)) {
      sync(tensor);
    }
  }
}

void cast_buffers(const std::vector<ManagedModule>& modules, const WrapScope& scope, WrapperState& unit) {
  const auto dtype = unit.options.mixed_precision.buffer_dtype;
  for (const auto& [name, module] : modules) {
    for (auto& buffer : own_buffers(*module, scope)) {
      if (dtype && buffer.is_floating_point() && buffer.scalar_type() != *dtype) {
        unit.cast_buffers.push_back({buffer, buffer.scalar_type()});
        buffer.set_data(buffer.to(*dtype));
      }
    }
  }
}

}  // namespace tessera
