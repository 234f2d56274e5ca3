#include "fully_shard/composable_apis.h"

#include "fully_shard/engine/fsdp_state.h"
#include "fully_shard/engine/unit_tree.h"
#include "fully_shard/managed_params.h"

namespace tessera {

std::vector<std::string> composable_apis(ModuleRef module) {
  const auto state = find_fsdp_state(*module);
  return state ? std::vector<std::string>{state->api()} : std::vector<std::string>{};
}

std::vector<torch::nn::Module*> managed_modules(ModuleRef module) {
  std::vector<torch::nn::Module*> modules;
  for (const auto& managed : collect_managed_modules(*module)) {
    modules.push_back(managed.module);
  }
  return modules;
}

}  // namespace tessera
