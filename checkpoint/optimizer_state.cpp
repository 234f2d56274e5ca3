#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <functional>
#include <map>
#include <set>
#include <type_traits>

#include "checkpoint/io/checkpoint_index.h"
#include "checkpoint/state_dict.h"
#include "checkpoint/transfer.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fsdp_module.h"
#include "optim/optimizer_fields.h"

namespace tessera::dcp {

namespace {

constexpr const char* kWhere = "checkpoint";

/// A parameter of the optimizer under the model's name.
struct NamedParam {
  std::string name;
  at::Tensor tensor;
  size_t group = 0;
};

/// Throws StateError inside of the model's forward or backward.
std::vector<NamedParam> named_params(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                                     bool ignore_frozen_params) {
  reshard_all(model);
  std::map<const void*, std::string> names;
  for (const auto& item : model.named_parameters()) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  std::vector<NamedParam> params;
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    for (const auto& param : optimizer.param_groups()[group].params()) {
      const auto found = names.find(param.unsafeGetTensorImpl());
      TESSERA_CHECK(ValueError, found != names.end(),
                    "checkpoint: group {} of the optimizer has a tensor of sizes {} that is no parameter of the model; "
                    "pass the module that holds all of the optimizer's parameters",
                    group, c10::str(param.sizes()));
      if (param.requires_grad() || !ignore_frozen_params) {
        params.push_back({.name = found->second, .tensor = param, .group = group});
      }
    }
  }
  return params;
}

std::string state_key(const NamedParam& param, const char* field) {
  return "state." + param.name + "." + field;
}

std::string option_key(const NamedParam& param, const char* field) {
  return "param_groups." + param.name + "." + field;
}

template <class Types>
typename Types::State* find_state(torch::optim::Optimizer& optimizer, const NamedParam& param) {
  auto& states = optimizer.state();
  const auto found = states.find(param.tensor.unsafeGetTensorImpl());
  return found == states.end() ? nullptr : static_cast<typename Types::State*>(found->second.get());
}

template <class Types>
typename Types::State& make_state(torch::optim::Optimizer& optimizer, const NamedParam& param) {
  if (!find_state<Types>(optimizer, param)) {
    optimizer.state()[param.tensor.unsafeGetTensorImpl()] = std::make_unique<typename Types::State>();
  }
  return *find_state<Types>(optimizer, param);
}

template <class Types>
typename Types::Options& options_of(torch::optim::Optimizer& optimizer, size_t group) {
  return static_cast<typename Types::Options&>(optimizer.param_groups()[group].options());
}

at::Tensor new_like(const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  return at::zeros_like(param.detach());
}

/// Whether the optimizer's tensor may stay. One that torch::load made is plain also where the parameter is sharded.
bool has_layout_of(const at::Tensor& field, const at::Tensor& param) {
  return field.defined() && (is_dtensor(field) || !is_dtensor(param));
}

/// The optimizer has for the parameter what it had before its first step.
template <class Types>
void reset_state(torch::optim::Optimizer& optimizer, const NamedParam& param) {
  optimizer.state().erase(param.tensor.unsafeGetTensorImpl());
  if (auto state = initial_state<Types>(param.tensor, options_of<Types>(optimizer, param.group))) {
    optimizer.state()[param.tensor.unsafeGetTensorImpl()] = std::move(state);
  }
}

template <class Field>
StateValue as_value(const Field& field) {
  if constexpr (std::is_same_v<Field, double>) {
    return field;
  } else {
    return static_cast<int64_t>(field);
  }
}

const char* type_name(const StateValue& value) {
  static constexpr const char* kNames[] = {"a tensor", "an int64_t", "a double", "a string"};
  return kNames[value.index()];
}

/// Writes a value of the state dict to a field of this type.
template <class Field>
void assign(Field& field, const std::string& key, const StateValue& value) {
  using Stored = std::conditional_t<std::is_same_v<Field, double>, double, int64_t>;
  const auto* stored = std::get_if<Stored>(&value);
  TESSERA_CHECK(ValueError, stored != nullptr, "set_optimizer_state_dict: '{}' is {}, and must be {}", key,
                type_name(value), std::is_same_v<Stored, double> ? "a double" : "an int64_t");
  field = static_cast<Field>(*stored);
}

/// One call of set_optimizer_state_dict for one type of optimizer: looks first, then changes.
template <class Types>
class Setter {
 public:
  Setter(torch::optim::Optimizer& optimizer, const std::vector<NamedParam>& params, const Incoming& incoming,
         const StateDictOptions& options)
      : optimizer_(optimizer), params_(params), incoming_(incoming), options_(options) {}

  void check() {
    TESSERA_CHECK(
        KeyError, !takes_away() || params_.empty() || !incoming_.state.empty(),
        "set_optimizer_state_dict: the dict is empty, which would take away all state. With full_state_dict "
        "and cpu_offload rank 0 alone has it: set it with broadcast_from_rank0. A checkpoint of a model alone "
        "has none: leave this call out");
    std::set<std::string> used;
    for (const auto& param : params_) {
      typename Types::State unused;
      visit_fields(unused, [&](const char* name, auto& field) {
        const auto key = state_key(param, name);
        if (const auto* value = find(key)) {
          used.insert(key);
          check_field(field, key, *value, param.tensor);
        }
      });
      check_options(param, used);
    }
    for (const auto& [key, value] : incoming_.state) {
      TESSERA_CHECK(
          KeyError, !options_.strict || used.count(key) == 1,
          "set_optimizer_state_dict: '{}' belongs to no parameter of the optimizer, or is not a field of this "
          "type of optimizer",
          key);
    }
  }

  void set(const RankSync& ranks) {
    for (const auto& param : params_) {
      visit_fields(options_of<Types>(optimizer_, param.group), [&](const char* name, auto& field) {
        if (const auto* value = find(option_key(param, name))) {
          assign(field, option_key(param, name), *value);
        }
      });
      if (has_state(param)) {
        visit_fields(make_state<Types>(optimizer_, param),
                     [&](const char* name, auto& field) { set_field(field, state_key(param, name), param, ranks); });
      } else if (takes_away()) {
        reset_state<Types>(optimizer_, param);
      }
    }
  }

 private:
  /// Whether what the dict lacks goes. A parameter that is left out for being frozen may have state all the same.
  bool takes_away() const { return options_.strict && !options_.ignore_frozen_params; }

  bool has_state(const NamedParam& param) const {
    bool found = false;
    typename Types::State fields;
    visit_fields(fields, [&](const char* name, const auto&) { found = found || find(state_key(param, name)); });
    return found;
  }

  const StateValue* find(const std::string& key) const {
    const auto found = incoming_.state.find(key);
    return found == incoming_.state.end() ? nullptr : &found->second;
  }

  template <class Field>
  void check_field(Field& field, const std::string& key, const StateValue& value, const at::Tensor& param) {
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      TESSERA_CHECK(ValueError, std::holds_alternative<at::Tensor>(value),
                    "set_optimizer_state_dict: '{}' is no tensor", key);
      check_fits(incoming_, key, param, options_);
    } else {
      assign(field, key, value);
    }
  }

  void check_options(const NamedParam& param, std::set<std::string>& used) {
    typename Types::Options unused(0.0);
    visit_fields(unused, [&](const char* name, auto& field) {
      const auto key = option_key(param, name);
      if (const auto* value = find(key)) {
        used.insert(key);
        assign(field, key, *value);
        const auto [first, is_new] = group_options_.try_emplace({param.group, name}, static_cast<double>(field));
        TESSERA_CHECK(ValueError, is_new || first->second == static_cast<double>(field),
                      "set_optimizer_state_dict: '{}' is {}, but other parameters of the optimizer's group {} have {}; "
                      "give parameters that need other options a group of their own",
                      key, static_cast<double>(field), param.group, first->second);
      }
    });
  }

  template <class Field>
  void set_field(Field& field, const std::string& key, const NamedParam& param, const RankSync& ranks) {
    const auto* value = find(key);
    if (!value) {
      if (takes_away()) {
        field = Field();
      }
      return;
    }
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      if (!has_layout_of(field, param.tensor)) {
        field = new_like(param.tensor);
      }
      // A handle to the field itself is there already. Not where rank 0 sends: all ranks are to come to that.
      if (options_.broadcast_from_rank0 || !std::get<at::Tensor>(*value).is_same(field)) {
        copy_in(incoming_, key, field, ranks, options_);
      }
    } else {
      assign(field, key, *value);
    }
  }

  torch::optim::Optimizer& optimizer_;
  const std::vector<NamedParam>& params_;
  const Incoming& incoming_;
  const StateDictOptions& options_;
  std::map<std::pair<size_t, std::string>, double> group_options_;
};

/// What the checkpoint has for the optimizer's parameters: the optimizer's own tensors, and new ones where it has none.
StateDict state_to_load(CheckpointIndex catalog, torch::nn::Module& model, torch::optim::Optimizer& optimizer) {
  const auto& tensors = catalog.tensors[Section::Optimizer];
  const auto& values = catalog.values[Section::Optimizer];
  StateDict own;
  with_types(optimizer, kWhere, [&]<class Types>(Types) {
    for (const auto& param : named_params(model, optimizer, false)) {
      typename Types::State fresh;
      auto* existing = find_state<Types>(optimizer, param);
      visit_fields(existing ? *existing : fresh, [&](const char* name, auto& field) {
        const auto key = state_key(param, name);
        if constexpr (!std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
          if (values.count(key) == 1) {
            own[key] = as_value(field);
          }
        } else if (tensors.count(key) == 1) {
          own[key] = has_layout_of(field, param.tensor) ? field : new_like(param.tensor);
        }
      });
      visit_fields(options_of<Types>(optimizer, param.group), [&](const char* name, auto& field) {
        if (values.count(option_key(param, name)) == 1) {
          own[option_key(param, name)] = as_value(field);
        }
      });
    }
  });
  return own;
}

}  // namespace

StateDict get_optimizer_state_dict(ModuleRef model, torch::optim::Optimizer& optimizer,
                                   const StateDictOptions& options) {
  if (options.full_state_dict) {
    reshard_on_all_ranks(model, "get_optimizer_state_dict");
  }
  StateDict own;
  const auto params = named_params(*model, optimizer, options.ignore_frozen_params);
  with_types(optimizer, kWhere, [&]<class Types>(Types) {
    for (const auto& param : params) {
      if (auto* state = find_state<Types>(optimizer, param)) {
        visit_fields(*state, [&](const char* name, auto& field) {
          if constexpr (!std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
            own[state_key(param, name)] = as_value(field);
          } else if (field.defined()) {
            own[state_key(param, name)] = field;
          }
        });
      }
      visit_fields(options_of<Types>(optimizer, param.group),
                   [&](const char* name, auto& field) { own[option_key(param, name)] = as_value(field); });
    }
  });
  return exported(std::move(own), RankSync::all(), options);
}

void set_optimizer_state_dict(ModuleRef model, torch::optim::Optimizer& optimizer, const StateDict& state,
                              const StateDictOptions& options) {
  const RankSync ranks = setting_ranks(*model, state, options);
  std::vector<NamedParam> params;
  ranks.on_all_ranks([&] {
    params = named_params(*model, optimizer, options.ignore_frozen_params);
    with_types(optimizer, kWhere, [](auto) {});  // which throws for a type that is not known
  });
  const Incoming incoming = receive(state, ranks, options);
  with_types(optimizer, kWhere, [&]<class Types>(Types) {
    Setter<Types> setter(optimizer, params, incoming, options);
    ranks.on_all_ranks([&] { setter.check(); });
    setter.set(ranks);
  });
}

StateDict optimizer_state_to_load(const std::string& path, ModuleRef model, torch::optim::Optimizer& optimizer) {
  StateDict own;
  RankSync::all().on_all_ranks([&] { own = state_to_load(open_catalog(path), *model, optimizer); });
  return own;
}

}  // namespace tessera::dcp
