#include "parallel/distribute_module.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/error.h"

namespace tessera {

namespace {

/// Returns parameters and buffers by name, without those of children.
std::vector<std::pair<std::string, at::Tensor>> own_tensors(torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    tensors.emplace_back(item.key(), item.value());
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    tensors.emplace_back(item.key(), item.value());
  }
  return tensors;
}

/// Runs before anything is changed.
void check_without_gradient(const at::Tensor& tensor, const char* caller, const std::string& name,
                            const torch::nn::Module& module) {
  TESSERA_CHECK(StateError, !tensor.defined() || is_dtensor(tensor) || !tensor.grad().defined(),
                "{}: \"{}\" of {} has a gradient already, which would stay whole; call zero_grad() before", caller,
                name, module_type_name(module));
}

void distribute_in_place(at::Tensor tensor, const DeviceMesh& mesh, const Placements& placements,
                         const DistributeOptions& options) {
  const auto whole = tensor.detach();
  tensor.set_data(distribute_tensor(whole, mesh, placements, options));
}

}  // namespace

void distribute_parameter(torch::nn::Module& module, const std::string& name, const DeviceMesh& mesh,
                          const Placements& placements, DistributeOptions options) {
  const auto tensors = own_tensors(module);
  const auto found = std::ranges::find(tensors, name, &std::pair<std::string, at::Tensor>::first);
  if (found == tensors.end()) {
    std::vector<std::string> names;
    names.reserve(tensors.size());
    for (const auto& [known, tensor] : tensors) {
      names.push_back(known);
    }
    throw KeyError(fmt::format("distribute_parameter: {} has no parameter or buffer \"{}\"; it has: {}",
                               module_type_name(module), name, fmt::join(names, ", ")));
  }
  TESSERA_CHECK(ValueError, !is_dtensor(found->second),
                "distribute_parameter: \"{}\" of {} is {} already; redistribute it", name, module_type_name(module),
                dtensor_spec(found->second)->to_string());
  check_without_gradient(found->second, "distribute_parameter", name, module);
  distribute_in_place(found->second, mesh, placements, options);
}

void distribute_module(ModuleRef module, const DeviceMesh& mesh, DistributeModuleOptions options) {
  auto* point = options.input_fn || options.output_fn ? &hook_point(*module, "distribute_module") : nullptr;
  const Placements replicated(static_cast<size_t>(mesh.ndim()), Replicate());
  for (const auto& part : module->modules()) {
    for (const auto& [key, tensor] : own_tensors(*part)) {
      check_without_gradient(tensor, "distribute_module", key, *part);
    }
  }
  std::set<const torch::nn::Module*> seen;
  const auto distribute = [&](const std::string& name, torch::nn::Module& part) {
    if (!seen.insert(&part).second) {
      return;
    }
    if (options.partition_fn) {
      options.partition_fn(name, part, mesh);
    }
    for (const auto& [key, tensor] : own_tensors(part)) {
      if (tensor.defined() && !is_dtensor(tensor)) {
        distribute_in_place(tensor, mesh, replicated, {});
      }
    }
  };
  distribute("", *module);
  for (const auto& item : module->named_modules("", /*include_self=*/false)) {
    distribute(item.key(), *item.value());
  }
  if (options.input_fn) {
    point->register_forward_pre_hook(
        [run = options.input_fn, mesh](HookPoint& at, TensorRefs inputs) { run(at.module(), inputs, mesh); });
  }
  if (options.output_fn) {
    point->register_forward_hook(
        [run = options.output_fn, mesh](HookPoint& at, TensorRefs outputs) { run(at.module(), outputs, mesh); });
  }
}

}  // namespace tessera
