#include "fsdp1/wrapper_state.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_set>

#include "base/error.h"
#include "comm/process_group.h"
#include "dtensor/local/dtensor_impl.h"

namespace tessera {

namespace {

using torch::nn::Module;

void add_units(Module& module, const std::string& path, std::unordered_set<WrapperState*>& seen,
               std::vector<NamedUnit>& units) {
  if (auto unit = find_fsdp_unit(module); unit && seen.insert(unit.get()).second) {
    units.push_back({path, &module, std::move(unit)});
  }
  for (const auto& child : module.named_children()) {
    add_units(*child.value(), path.empty() ? child.key() : path + "." + child.key(), seen, units);
  }
}

}  // namespace

std::shared_ptr<WrapperState> find_fsdp_unit(Module& module) {
  const auto* point = find_hook_point(module);
  return point ? point->find<WrapperState>() : nullptr;
}

std::vector<NamedUnit> fsdp_units(Module& module) {
  std::unordered_set<WrapperState*> seen;
  std::vector<NamedUnit> units;
  add_units(module, "", seen, units);
  return units;
}

void check_not_summoned(bool is_summoned, const HookPoint& at) {
  TESSERA_CHECK(StateError, !is_summoned,
                "forward of {} inside of summon_full_params: its parameters are lent to the scope; call it after",
                at.type_name());
}

bool is_first_rank(const std::vector<NamedUnit>& units) {
  return get_rank() == (units.empty() ? 0 : std::ranges::min(units.front().unit->mesh.root().ranks()));
}

TrainingState WrapperState::training_state() const {
  if (is_summoned) {
    return TrainingState::SUMMON_FULL_PARAMS;
  }
  return state->is_running() ? TrainingState::FORWARD_BACKWARD : TrainingState::IDLE;
}

void WrapperState::assert_state(const std::string& where, const std::vector<TrainingState>& allowed) const {
  const auto now = training_state();
  std::vector<std::string_view> names;
  names.reserve(allowed.size());
  for (const auto state : allowed) {
    names.push_back(to_string(state));
  }
  TESSERA_CHECK(ValueError, std::find(allowed.begin(), allowed.end(), now) != allowed.end(),
                "{}: {} is in the state {}, allowed: {}", where, state->label(), to_string(now),
                fmt::join(names, ", "));
}

bool WrapperState::is_root(Module& module) const {
  if (!state->root()) {
    FSDPRoot::make(module);
  }
  return state->root()->is_outermost(*state);
}

at::Tensor on_device(const at::Tensor& tensor, at::Device device) {
  const auto* meta = dtensor_meta(tensor);
  if (!meta) {
    return tensor.to(device);
  }
  return meta->local.device() == device ? tensor : wrap_local(meta->local.to(device), meta->spec);
}

}  // namespace tessera
