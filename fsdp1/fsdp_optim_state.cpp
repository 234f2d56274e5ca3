#include "fsdp1/fsdp_optim_state.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/gather_full.h"
#include "dtensor/local/redistribute.h"
#include "fsdp1/first_rank.h"
#include "fsdp1/fsdp.h"
#include "fsdp1/param_names.h"
#include "fsdp1/wrapper_state.h"
#include "optim/optimizer_fields.h"

namespace tessera {

namespace {

using torch::nn::Module;
using torch::optim::Optimizer;
using Entry = std::map<std::string, at::Tensor>;
using Key = OptimStateDict::Key;
using OptionValues = std::map<std::string, double>;

constexpr const char* kOptimStateWhere = "optim_state_dict";
constexpr const char* kOptimLoadWhere = "optim_state_dict_to_load";

/// Returns numbers as tensors without dims. Omits tensors that the optimizer has not created.
template <class State>
Entry make_entry(State& state) {
  Entry entry;
  visit_fields(state, [&](const char* name, auto& field) {
    if constexpr (!std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
      entry[name] = at::scalar_tensor(field, at::kLong);
    } else if (field.defined()) {
      entry[name] = field;
    }
  });
  return entry;
}

/// Throws std::out_of_range if the entry lacks a number.
template <class State>
std::unique_ptr<State> make_state(const Entry& entry) {
  auto state = std::make_unique<State>();
  visit_fields(*state, [&](const char* name, auto& field) {
    if constexpr (!std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
      field = entry.at(name).template item<int64_t>();
    } else if (const auto found = entry.find(name); found != entry.end()) {
      field = found->second;
    }
  });
  return state;
}

template <class GroupOptions>
OptionValues option_values(GroupOptions& options) {
  OptionValues values;
  visit_fields(options, [&](const char* name, const auto& field) { values[name] = static_cast<double>(field); });
  return values;
}

/// Throws std::out_of_range if `values` lacks an option.
template <class GroupOptions>
void set_options(GroupOptions& options, const OptionValues& values) {
  visit_fields(options, [&]<class Field>(const char* name, Field& field) {
    const double value = values.at(name);
    if constexpr (std::is_same_v<Field, bool>) {
      field = value != 0;
    } else {
      field = value;
    }
  });
}

std::vector<at::Tensor> optimizer_params(const Optimizer& optim) {
  std::vector<at::Tensor> params;
  for (const auto& group : optim.param_groups()) {
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  return params;
}

/// Returns names of the optimizer's parameters by index.
std::vector<std::string> param_names(const Module& model, const Optimizer& optim) {
  std::unordered_map<c10::TensorImpl*, std::string> names;
  for (const auto& [param, name] : param_to_fqn(model)) {
    names.emplace(param.unsafeGetTensorImpl(), name);
  }
  std::vector<std::string> result;
  for (const auto& param : optimizer_params(optim)) {
    const auto found = names.find(param.unsafeGetTensorImpl());
    TESSERA_CHECK(KeyError, found != names.end(),
                  "optim_state_dict: parameter {} of the optimizer is none of the model", result.size());
    result.push_back(found->second);
  }
  return result;
}

/// Returns a copy.
at::Tensor saved_tensor(const at::Tensor& tensor, const StateDictSettings& settings) {
  const auto* meta = dtensor_meta(tensor);
  if (!meta) {
    return tensor.clone();
  }
  const bool offloads =
      std::visit([](const auto& config) { return config.offload_to_cpu; }, settings.optim_state_dict_config);
  const auto saved = settings.type == StateDictType::SHARDED_STATE_DICT ? tensor.detach() : gather_full(*meta);
  const auto moved = offloads ? on_device(saved, at::kCPU) : saved;
  return moved.is_same(saved) ? saved.clone() : moved;
}

/// Returns an entry in the form that the optimizer of a sharded parameter holds.
at::Tensor loaded_tensor(const at::Tensor& value, const at::Tensor& param) {
  const auto* meta = dtensor_meta(param);
  if (!meta || value.dim() == 0) {
    return value.clone();
  }
  const auto moved = on_device(value, meta->local.device());
  if (dtensor_meta(value)) {
    const auto placed = redistribute(moved, meta->spec->mesh(), meta->spec->placements());
    return placed.is_same(value) ? value.clone() : placed;
  }
  return wrap_local(local_shard_of(moved, *meta->spec).clone(), meta->spec->with_dtype(value.scalar_type()));
}

void check_known(const char* where, const std::vector<std::string>& names, const std::string& name) {
  TESSERA_CHECK(KeyError, std::find(names.begin(), names.end(), name) != names.end(),
                "{}: the optimizer has no parameter '{}'", where, name);
}

void check_key_types(const OptimStateDict& dict) {
  std::vector<size_t> kinds;
  for (const auto& [key, entry] : dict.state) {
    kinds.push_back(key.index());
  }
  for (const auto& group : dict.param_groups) {
    for (const auto& key : group.params) {
      kinds.push_back(key.index());
    }
  }
  const bool is_mixed = std::adjacent_find(kinds.begin(), kinds.end(), std::not_equal_to<>()) != kinds.end();
  TESSERA_CHECK(ValueError, !is_mixed, "rekey_optim_state_dict: keys are names and ids; they are all of one kind");
}

/// Adds the optimizer's initial state for parameters without an entry.
template <class Types>
auto initial_states(Optimizer& optim) {
  std::remove_reference_t<decltype(optim.state())> states;
  for (auto& group : optim.param_groups()) {
    for (const auto& param : group.params()) {
      const auto& options = static_cast<const typename Types::Options&>(group.options());
      if (auto state = initial_state<Types>(param, options)) {
        states[param.unsafeGetTensorImpl()] = std::move(state);
      }
    }
  }
  return states;
}

template <class Types>
void load_into(Optimizer& optim, const OptimStateDict& by_id) {
  using GroupOptions = typename Types::Options;
  const auto params = optimizer_params(optim);
  auto states = initial_states<Types>(optim);
  std::vector<GroupOptions> options;
  try {
    for (const auto& [key, entry] : by_id.state) {
      auto* const impl = params.at(static_cast<size_t>(std::get<int64_t>(key))).unsafeGetTensorImpl();
      states[impl] = make_state<typename Types::State>(entry);
    }
    for (size_t i = 0; i < by_id.param_groups.size(); ++i) {
      options.push_back(static_cast<const GroupOptions&>(optim.param_groups()[i].options()));
      set_options(options.back(), by_id.param_groups[i].options);
    }
  } catch (const std::out_of_range&) {
    throw ValueError(
        "optim_state_dict_to_load: the dict lacks what this optimizer keeps; it is that of an optimizer of another "
        "kind");
  }
  optim.state() = std::move(states);
  for (size_t i = 0; i < options.size(); ++i) {
    static_cast<GroupOptions&>(optim.param_groups()[i].options()) = options[i];
  }
}

void check_groups(const char* where, const OptimStateDict& dict, const Optimizer& optim) {
  const auto& own = optim.param_groups();
  bool fits = dict.param_groups.size() == own.size();
  for (size_t i = 0; fits && i < own.size(); ++i) {
    fits = dict.param_groups[i].params.size() == own[i].params().size();
  }
  TESSERA_CHECK(ValueError, fits,
                "{}: the groups of the dict and of the optimizer differ in number or sizes; build the optimizer over "
                "the same groups of parameters",
                where);
}

/// Returns the optimizer's state by name, without copying.
OptimStateDict held_by(const Module& model, Optimizer& optim) {
  const auto names = param_names(model, optim);
  OptimStateDict dict;
  with_types(optim, kOptimStateWhere, [&]<class Types>(Types) {
    size_t place = 0;
    for (auto& group : optim.param_groups()) {
      OptimStateDict::Group held;
      held.options = option_values(static_cast<typename Types::Options&>(group.options()));
      for (const auto& param : group.params()) {
        const Key name = names[place++];
        held.params.push_back(name);
        const auto found = optim.state().find(param.unsafeGetTensorImpl());
        if (found != optim.state().end()) {
          dict.state[name] = make_entry(static_cast<typename Types::State&>(*found->second));
        }
      }
      dict.param_groups.push_back(std::move(held));
    }
  });
  return dict;
}

/// Returns a dict that the program passes instead of the optimizer's own, by name.
OptimStateDict named_source(const OptimStateDict& source, const Module& model, const Optimizer& optim) {
  auto dict = rekey_optim_state_dict(source, OptimStateKeyType::PARAM_NAME, model, optim);
  check_groups(kOptimStateWhere, dict, optim);
  const auto names = param_names(model, optim);
  for (const auto& [key, entry] : dict.state) {
    check_known(kOptimStateWhere, names, std::get<std::string>(key));
  }
  return dict;
}

bool is_rank0_only(const StateDictSettings& settings) {
  const auto* config = std::get_if<FullOptimStateDictConfig>(&settings.optim_state_dict_config);
  return config && config->rank0_only;
}

/// Checks entries, including those on the meta device, as in the outline of another rank's dict.
void check_entries(const OptimStateDict& by_name, const std::vector<std::string>& names,
                   const std::map<std::string, at::Tensor>& params) {
  for (const auto& [key, entry] : by_name.state) {
    const auto& name = std::get<std::string>(key);
    check_known(kOptimLoadWhere, names, name);
    for (const auto& [field, tensor] : entry) {
      const auto& param = params.at(name);
      TESSERA_CHECK(ValueError, tensor.dim() == 0 || !dtensor_meta(param) || tensor.sizes() == param.sizes(),
                    "optim_state_dict_to_load: the state of '{}' is {}, the parameter {}; the dict is that of another "
                    "model",
                    name, tensor.sizes(), param.sizes());
    }
  }
}

}  // namespace

OptimStateDict optim_state_dict(Module& model, Optimizer& optim, const OptimStateDictOptions& options) {
  const at::NoGradGuard no_grad;
  const auto settings = FSDP::get_state_dict_type(model).value_or(StateDictSettings());
  TESSERA_CHECK(NotImplementedError, settings.type != StateDictType::LOCAL_STATE_DICT,
                "optim_state_dict: LOCAL_STATE_DICT has no form for optimizers; use SHARDED_STATE_DICT");
  auto dict = options.optim_state_dict ? named_source(*options.optim_state_dict, model, optim) : held_by(model, optim);
  for (auto& [name, entry] : dict.state) {
    for (auto& [field, tensor] : entry) {
      tensor = saved_tensor(tensor, settings);
    }
  }
  return !is_rank0_only(settings) || FirstRank(model, options.group).is_this_one() ? dict : OptimStateDict();
}

OptimStateDict rekey_optim_state_dict(const OptimStateDict& dict, OptimStateKeyType key_type, const Module& model,
                                      const Optimizer& optim) {
  TESSERA_CHECK(ValueError, key_type == OptimStateKeyType::PARAM_NAME || key_type == OptimStateKeyType::PARAM_ID,
                "rekey_optim_state_dict: key type {}; PARAM_NAME and PARAM_ID are known", static_cast<int>(key_type));
  check_key_types(dict);
  const auto names = param_names(model, optim);
  std::unordered_map<std::string, int64_t> ids;
  for (size_t i = 0; i < names.size(); ++i) {
    ids.emplace(names[i], static_cast<int64_t>(i));
  }
  const auto rekeyed = [&](const Key& key) -> std::optional<Key> {
    if (const auto* name = std::get_if<std::string>(&key)) {
      const auto id = ids.find(*name);
      return key_type == OptimStateKeyType::PARAM_NAME ? std::optional<Key>(key)
             : id == ids.end()                         ? std::nullopt
                                                       : std::optional<Key>(id->second);
    }
    const auto id = std::get<int64_t>(key);
    TESSERA_CHECK(KeyError, id >= 0 && id < static_cast<int64_t>(names.size()),
                  "rekey_optim_state_dict: id {}; the optimizer has {} parameters", id, names.size());
    return key_type == OptimStateKeyType::PARAM_ID ? Key(id) : Key(names[static_cast<size_t>(id)]);
  };
  OptimStateDict result;
  for (const auto& [key, entry] : dict.state) {
    if (const auto other = rekeyed(key)) {
      result.state.emplace(*other, entry);
    }
  }
  for (const auto& group : dict.param_groups) {
    OptimStateDict::Group own{{}, group.options};
    for (const auto& key : group.params) {
      if (const auto other = rekeyed(key)) {
        own.params.push_back(*other);
      }
    }
    result.param_groups.push_back(std::move(own));
  }
  return result;
}

OptimStateDict optim_state_dict_to_load(Module& model, Optimizer& optim, const OptimStateDict& dict,
                                        OptimStateDictToLoadOptions options) {
  const at::NoGradGuard no_grad;
  reshard_all(model);
  const auto own = [&] { return rekey_optim_state_dict(dict, OptimStateKeyType::PARAM_NAME, model, optim); };
  const auto settings = FSDP::get_state_dict_type(model).value_or(StateDictSettings());
  std::optional<FirstRank> first;
  if (is_rank0_only(settings)) {
    first.emplace(model, options.group);
  }
  auto by_name = first ? first->outline(own) : own();
  check_groups(kOptimLoadWhere, by_name, optim);
  const auto params = fqn_to_param(model);
  check_entries(by_name, param_names(model, optim), params);
  for (auto& [key, entry] : by_name.state) {
    for (auto& [field, tensor] : entry) {
      tensor = loaded_tensor(first ? first->value(tensor) : tensor, params.at(std::get<std::string>(key)));
    }
  }
  const auto by_id = rekey_optim_state_dict(by_name, OptimStateKeyType::PARAM_ID, model, optim);
  if (options.load_directly) {
    with_types(optim, kOptimStateWhere, [&]<class Types>(Types) { load_into<Types>(optim, by_id); });
  }
  return options.is_named_optimizer ? by_name : by_id;
}

}  // namespace tessera
