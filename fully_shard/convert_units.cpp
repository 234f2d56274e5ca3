#include "fully_shard/convert_units.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device_mesh/rank_agreement.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/tensor_memory.h"
#include "fully_shard/check_params.h"
#include "fully_shard/engine/fsdp_root.h"
#include "fully_shard/engine/unit_tree.h"
#include "fully_shard/make_unit.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

/// Unit with its new options and parameters.
struct ConvertedUnit {
  std::shared_ptr<FSDPState> state;
  std::shared_ptr<UnitRecipe> recipe;
  at::Device device;  // compute device
  DeviceMesh mesh;
  ParamGroup::Options group;
  std::vector<ParamInfo> params = {};  // full, without memory
};

ModulePtr live_module(const FSDPState& state) {
  ModulePtr module;
  for (const auto& weak : state.modules()) {
    module = module ? module : weak.lock();
  }
  return module;
}

at::ScalarType dtype_after(const ShardedParam& param, const UnitConversion& to) {
  const auto own = param.spec()->dtype();
  return to.dtype && c10::isFloatingType(own) ? *to.dtype : own;
}

bool changes(const FSDPState& state, const UnitConversion& to) {
  const auto& group = state.group();
  return group && ((to.device && *to.device != group->context().device) ||
                   std::ranges::any_of(group->params(), [&](const ShardedParam& param) {
                     return dtype_after(param, to) != param.spec()->dtype();
                   }));
}

/// Returns the outermost modules of trees that ran, each once. Units of one tree share memory and streams.
std::vector<ModulePtr> outermost_modules(const std::vector<NamedState>& units) {
  std::vector<ModulePtr> modules;
  for (const auto& [path, state] : units) {
    const auto outermost = state->root() ? state->root()->outermost() : nullptr;
    auto module = state->root() ? live_module(outermost ? *outermost : *state) : nullptr;
    if (module && std::ranges::find(modules, module) == modules.end()) {
      modules.push_back(std::move(module));
    }
  }
  return modules;
}

void check_between_iterations(std::vector<NamedState> units, const std::string& where) {
  for (const auto& module : outermost_modules(units)) {
    const auto tree = fsdp_states_of_unit(*module);
    units.insert(units.end(), tree.begin(), tree.end());
  }
  for (const auto& [path, state] : units) {
    TESSERA_CHECK(
        StateError, state->is_idle() && (!state->root() || state->root()->awaited_backward() == -1),
        "{}: the unit '{}' computes, awaits the backward of a forward, or has gradients that await their reduction. "
        "Run that backward, outside of no_sync, or drop the loss; fsdp(model).reset_iter_state() on the outermost "
        "module drops such gradients, and what a backward that threw left",
        where, path);
  }
}

ConvertedUnit plan_unit(const std::shared_ptr<FSDPState>& state, const UnitConversion& to, const std::string& where) {
  const auto& context = state->group()->context();
  const auto& axes = context.axes;
  const auto recipe = find_hook_point(*live_module(*state))->find<UnitRecipe>();
  const auto device = to.device.value_or(context.device);
  const bool is_tp = !recipe->tp_specs.empty();
  TESSERA_CHECK(NotImplementedError, device == context.device || (device.type() != context.device.type() && !is_tp),
                "{0}: {1} computes on {2}, and cannot go to {3}: {4}. Build it on {3}, or give device_id = {3}", where,
                state->label(), context.device.str(), device.str(),
                is_tp ? "its tensor-parallel plan computes there" : "its ranks communicate on one GPU each");
  const auto mesh = device == context.device ? axes.mesh : axes.mesh.with_device_type(device.type());
  ConvertedUnit unit{state, recipe, device, mesh, group_options(recipe->request, mesh, where)};
  for (const auto& param : state->group()->params()) {
    const auto dtype = dtype_after(param, to);
    const auto found = recipe->tp_specs.find(param.origin().name);
    const auto tp_spec = found == recipe->tp_specs.end() ? nullptr : found->second->with_dtype(dtype);
    const auto tensor = unsharded_on_meta(param.param(), tp_spec, dtype);
    const auto& placements = param.spec()->placements();
    unit.params.push_back({.tensor = tensor,
                           .origin = dtensor_meta(param.param())->origin,
                           .shard_dim = axes.shard_axis ? placements[static_cast<size_t>(*axes.shard_axis)].dim() : 0,
                           .tp_spec = tp_spec,
                           .gather = gather_item({param.origin().name, tensor}, recipe->request.options)});
  }
  return unit;
}

/// Versions continue, so that an earlier graph detects the change.
void copy_values(const ShardedParam& from, ShardedParam& to, const at::TensorOptions& options) {
  const auto& shard = to.shard();
  shard.copy_(from.shard());
  if (!shard.is_inference()) {
    shard.unsafeGetTensorImpl()->set_version_counter(from.shard().unsafeGetTensorImpl()->version_counter());
    count_write(shard);
  }
  if (const auto* grad = dtensor_meta(from.param().grad())) {
    const auto local = at::empty(shard.sizes(), options.dtype(shard.dtype())).copy_(grad->local);
    to.set_sharded_grad(wrap_local(local, to.spec(), to.grad_origin()));
  }
}

void convert(ConvertedUnit& unit) {
  const auto from = unit.state->group();
  const c10::InferenceMode mode(from->params()[0].shard().is_inference());
  const c10::DeviceGuard current(unit.device);
  for (size_t i = 0; i < unit.params.size(); ++i) {
    const auto& param = from->params()[i].param();
    replace_data(param, std::exchange(unit.params[i].tensor, param));
    if (unit.params[i].tp_spec) {
      unit.recipe->tp_specs[unit.params[i].origin->name] = unit.params[i].tp_spec;
    }
  }
  const auto to = std::make_shared<ParamGroup>(unit.params, unit.group);
  if (!from->unit_params().is_on_meta()) {
    to->materialize();
    const at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < unit.params.size(); ++i) {
      copy_values(from->params()[i], to->unit_params().all()[i], to->context().shard_options);
    }
  }
  to->gather_stream()->wait_for_current();  // a backward may gather without a forward before it
  unit.recipe->request.options.mesh = unit.mesh;
  unit.state->replace_group(to);
}

}  // namespace

void convert_units(torch::nn::Module& module, const std::string& where,
                   const std::function<UnitConversion()>& request) {
  const auto units = fsdp_states(module);
  std::vector<ConvertedUnit> converted;
  check_ranks_agree(collect_meshes(units), where, [&] {
    const auto to = request();
    std::vector<std::string> items{to.dtype ? c10::toString(*to.dtype) : c10::DeviceTypeName(to.device->type())};
    std::vector<NamedState> changed;
    std::ranges::copy_if(units, std::back_inserter(changed),
                         [&](const auto& unit) { return changes(*unit.state, to); });
    if (changed.empty()) {
      return items;
    }
    check_between_iterations(units, where);
    const auto fault = reshard_each(changed);
    TESSERA_CHECK(StateError, fault.empty(), "{}", fault);
    for (const auto& [path, state] : changed) {
      auto& params = state->group()->unit_params();
      if (params.fault() == ShardFault::Replaced) {
        params.check_usable();
      }
      converted.push_back(plan_unit(state, to, where));
      items.push_back(path);
    }
    return items;
  });
  const auto outermost = converted.empty() ? std::vector<ModulePtr>() : outermost_modules(units);
  for (auto& unit : converted) {
    convert(unit);
  }
  for (const auto& each : outermost) {
    FSDPRoot::make(*each);
  }
}

}  // namespace tessera
