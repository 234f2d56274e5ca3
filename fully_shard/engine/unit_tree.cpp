#include "fully_shard/engine/unit_tree.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "device_mesh/rank_agreement.h"
#include "fully_shard/engine/fsdp_state.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

void add_states(torch::nn::Module& module, const std::string& path, std::vector<NamedState>& states) {
  if (auto state = find_fsdp_state(module)) {
    const auto is_same = [&](const NamedState& other) { return other.state == state; };
    if (std::none_of(states.begin(), states.end(), is_same)) {
      states.push_back({path.empty() ? "root" : path, std::move(state)});
    }
  }
  for (const auto& child : module.named_children()) {
    add_states(*child.value(), path.empty() ? child.key() : path + "." + child.key(), states);
  }
}

}  // namespace

std::shared_ptr<FSDPState> find_fsdp_state(torch::nn::Module& module) {
  const auto* point = find_hook_point(module);
  return point ? point->find<FSDPState>() : nullptr;
}

std::vector<NamedState> fsdp_states(torch::nn::Module& module) {
  std::vector<NamedState> states;
  add_states(module, "", states);
  return states;
}

std::vector<NamedState> fsdp_states_of_unit(torch::nn::Module& module) {
  const auto unit = find_fsdp_state(module);
  const auto& modules = unit->modules();
  if (modules.size() == 1) {
    return fsdp_states(module);
  }
  std::vector<NamedState> states = {{"root", unit}};
  for (size_t i = 0; i < modules.size(); ++i) {
    if (const auto live = modules[i].lock()) {
      add_states(*live, std::to_string(i), states);
    }
  }
  add_states(module, "", states);  // which may not be owned by a shared_ptr
  return states;
}

std::vector<DeviceMesh> collect_meshes(const std::vector<NamedState>& units) {
  std::vector<DeviceMesh> meshes;
  for (const auto& [path, state] : units) {
    if (!state->group()) {
      continue;
    }
    for (const auto& param : state->group()->params()) {
      if (std::ranges::find(meshes, param.spec()->mesh()) == meshes.end()) {
        meshes.push_back(param.spec()->mesh());
      }
    }
  }
  return meshes;
}

std::vector<NamedState> with_shards(std::vector<NamedState> units) {
  const auto is_cut = [](const ShardedParam& param) {
    const auto& spec = *param.spec();
    for (size_t axis = 0; axis < spec.placements().size(); ++axis) {
      if (!spec.placements()[axis].is_replicate() && spec.mesh().shape()[axis] > 1) {
        return true;
      }
    }
    return false;
  };
  std::erase_if(units, [&](const NamedState& unit) {
    const auto& group = unit.state->group();
    return !group || std::ranges::none_of(group->params(), is_cut);
  });
  return units;
}

std::string reshard_each(const std::vector<NamedState>& units) {
  std::string fault;
  for (const auto& [path, state] : units) {
    try {
      if (const auto& group = state->group()) {
        group->reshard();
      }
    } catch (const StateError& error) {
      fault = fault.empty() ? error.what() : fault;
    }
  }
  return fault;
}

void throw_on_all_ranks(const std::vector<NamedState>& units, const std::string& where, const std::string& fault) {
  throw_on_all_ranks(collect_meshes(units), where, fault);
}

}  // namespace tessera
