#include "fully_shard/clone_sharded.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/tensor_memory.h"
#include "fully_shard/engine/fsdp_state.h"
#include "fully_shard/engine/unit_tree.h"
#include "fully_shard/make_unit.h"
#include "nn/hooks/clone.h"
#include "nn/hooks/clone_scope.h"
#include "nn/hooks/hook_point.h"
#include "nn/meta_device.h"

namespace tessera {

namespace {

/// Numbers of hooks and attachments that install() and make_unit() add to a module.
constexpr CloneScope::Renewed kOfAUnit{.hooks = 3, .attachments = 2};

/// Throws on every rank, because only one rank may keep a graph that expects a backward.
void check_idle(torch::nn::Module& module) {
  const auto states = fsdp_states(module);
  std::string fault;
  for (const auto& [path, state] : states) {
    const bool is_sharded = !state->group() || state->group()->state() == ShardedState::Sharded;
    if (fault.empty() && (!state->is_idle() || !is_sharded)) {
      fault = fmt::format(
          "clone_sharded: the unit '{}' is in the middle of an iteration, or unsharded; finish the backward, or drop "
          "its loss, or call fsdp(module).reshard(), first; after a backward that threw, reset_iter_state()",
          path);
    }
  }
  throw_on_all_ranks(states, "clone_sharded", fault);
}

struct Unit {
  std::shared_ptr<FSDPState> state;
  std::shared_ptr<const UnitRecipe> recipe;
};

/// Returns the units of `module` in the order in which they were made.
std::vector<Unit> units_as_made(torch::nn::Module& module) {
  std::vector<Unit> units;
  for (const auto& each : module.modules()) {
    const auto* point = find_hook_point(*each);
    const auto recipe = point ? point->find<UnitRecipe>() : nullptr;
    if (recipe && std::ranges::find(units, recipe, &Unit::recipe) == units.end()) {
      units.push_back({.state = point->find<FSDPState>(), .recipe = recipe});
    }
  }
  std::ranges::sort(units, {}, [](const Unit& unit) { return unit.recipe->number; });
  return units;
}

/// Runs before anything is copied.
void check_all_inside(torch::nn::Module& module, const std::vector<Unit>& units) {
  const auto inside = module.modules();
  for (const auto& [state, recipe] : units) {
    for (const auto* member : recipe->request.modules) {
      TESSERA_CHECK(NotImplementedError,
                    std::ranges::any_of(inside, [&](const auto& each) { return each.get() == member; }),
                    "clone_sharded: the unit {} has modules outside of {}; clone a module that has all of them",
                    state->label(), module_type_name(module));
    }
  }
}

/// Modules and tensors of a module and of its copy, which has the same structure.
struct Counterparts {
  std::unordered_map<const torch::nn::Module*, torch::nn::Module*> modules;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> tensors;

  Counterparts(torch::nn::Module& source, torch::nn::Module& copy) {
    const auto from = source.modules(), to = copy.modules();
    TESSERA_ASSERT(from.size() == to.size(), "{} modules and {} in the copy", from.size(), to.size());
    for (size_t i = 0; i < from.size(); ++i) {
      const auto counterpart = modules.try_emplace(from[i].get(), to[i].get()).first;
      TESSERA_CHECK(
          NotImplementedError, counterpart->second == to[i].get(),
          "clone_sharded: a {} stands several times in {}, but its clone has one for each place, as containers "
          "of torch::nn make them. Use tessera::nn::Sequential, or register the module in reset()",
          module_type_name(*from[i]), module_type_name(source));
    }
    const auto params = copy.named_parameters();
    for (const auto& item : source.named_parameters()) {
      tensors[item.value().unsafeGetTensorImpl()] = params[item.key()];
    }
  }
};

void make_unit_again(FSDPState& source, const UnitRecipe& recipe, Counterparts& counterparts) {
  auto request = recipe.request;
  for (auto& module : request.modules) {
    module = counterparts.modules.at(module);
  }
  for (auto& ignored : request.options.ignored_params) {
    const auto found = counterparts.tensors.find(ignored.unsafeGetTensorImpl());
    ignored = found == counterparts.tensors.end() ? ignored : found->second;
  }
  if (source.group()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& param : source.group()->params()) {
      const auto tp_spec = recipe.tp_specs.find(param.origin().name);
      const auto& own = counterparts.tensors.at(param.param().unsafeGetTensorImpl());
      replace_data(own, unsharded_on_meta(param.param(), tp_spec == recipe.tp_specs.end() ? nullptr : tp_spec->second,
                                          param.param().scalar_type()));
      own.set_requires_grad(param.requires_grad());
    }
  }
  make_unit(request);
}

void copy_shards(FSDPState& source, FSDPState& copy) {
  if (!source.group()) {
    return;
  }
  const auto& from = source.group()->params();
  const auto& to = copy.group()->params();
  TESSERA_ASSERT(from.size() == to.size(), "{} parameters and {} in the copy", from.size(), to.size());
  copy.group()->materialize();
  const at::AutoDispatchBelowADInplaceOrView below;
  for (size_t i = 0; i < from.size(); ++i) {
    dtensor_meta(to[i].param())->local.copy_(dtensor_meta(from[i].param())->local);
  }
}

std::shared_ptr<torch::nn::Module> clone_unsharded(torch::nn::Module& module) {
  const CloneScope scope(
      [](const HookPoint& point) { return point.find<UnitRecipe>() ? kOfAUnit : CloneScope::Renewed{}; });
  const at::NoGradGuard no_grad;
  const MetaDeviceGuard on_meta;
  return clone_module(module);
}

}  // namespace

std::shared_ptr<torch::nn::Module> clone_sharded(torch::nn::Module& module) {
  check_idle(module);
  const auto units = units_as_made(module);
  check_all_inside(module, units);
  auto copy = clone_unsharded(module);
  Counterparts counterparts(module, *copy);
  for (const auto& [state, recipe] : units) {
    make_unit_again(*state, *recipe, counterparts);
    copy_shards(*state, *find_fsdp_state(*counterparts.modules.at(recipe->request.modules[0])));
  }
  return copy;
}

}  // namespace tessera
