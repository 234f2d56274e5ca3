#include "fully_shard/managed_params.h"

#include <fmt/format.h>

#include <unordered_set>

#include "fully_shard/engine/unit_tree.h"

namespace tessera {

namespace {

void add_modules(torch::nn::Module& module, const std::string& name, std::unordered_set<torch::nn::Module*>& seen,
                 std::vector<ManagedModule>& modules) {
  if (!seen.insert(&module).second) {
    return;
  }
  modules.push_back({name, &module});
  for (const auto& child : module.named_children()) {
    if (!find_fsdp_state(*child.value())) {
      add_modules(*child.value(), name.empty() ? child.key() : name + "." + child.key(), seen, modules);
    }
  }
}

}  // namespace

std::vector<ManagedModule> collect_managed_modules(torch::nn::Module& module) {
  std::unordered_set<torch::nn::Module*> seen;
  std::vector<ManagedModule> modules;
  add_modules(module, "", seen, modules);
  return modules;
}

std::vector<ManagedParam> collect_managed_params(const std::vector<torch::nn::Module*>& modules,
                                                 const std::vector<at::Tensor>& ignored) {
  std::unordered_set<c10::TensorImpl*> seen;
  for (const auto& param : ignored) {
    seen.insert(param.unsafeGetTensorImpl());
  }
  std::vector<ManagedParam> params;
  for (size_t i = 0; i < modules.size(); ++i) {
    const std::string place = modules.size() == 1 ? "" : std::to_string(i) + ".";
    for (const auto& [name, module] : collect_managed_modules(*modules[i])) {
      for (const auto& item : module->named_parameters(/*recurse=*/false)) {
        if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second) {
          const auto dot = name.empty() ? "" : ".";
          params.push_back({fmt::format("{}{}{}{}", place, name, dot, item.key()), item.value()});
        }
      }
    }
  }
  return params;
}

}  // namespace tessera
