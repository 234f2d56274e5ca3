#include "fully_shard/composable_apis.h"

#include <unordered_set>

#include "fully_shard/engine/fsdp_state.h"
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

std::vector<std::string> composable_apis(ModuleRef module) {
  const auto state = find_fsdp_state(*module);
  return state ? std::vector<std::string>{state->api()} : std::vector<std::string>{};
}

std::vector<ManagedModule> named_managed_modules(torch::nn::Module& module) {
  std::unordered_set<torch::nn::Module*> seen;
  std::vector<ManagedModule> modules;
  add_modules(module, "", seen, modules);
  return modules;
}

std::vector<torch::nn::Module*> managed_modules(ModuleRef module) {
  std::vector<torch::nn::Module*> modules;
  for (const auto& managed : named_managed_modules(*module)) {
    modules.push_back(managed.module);
  }
  return modules;
}

}  // namespace tessera
