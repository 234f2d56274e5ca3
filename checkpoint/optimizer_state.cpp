#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <type_traits>
#include <unordered_set>
#include <utility>

#include "checkpoint/io/checkpoint_index.h"
#include "checkpoint/state_dict.h"
#include "checkpoint/transfer.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fsdp_module.h"
#include "optim/optimizer_fields.h"

namespace tessera::dcp {

namespace {

constexpr const char* kWhere = "checkpoint";

/// Parameter of the optimizer with its name in the model.
struct NamedParam {
  std::string name;
  at::Tensor tensor;
  size_t group = 0;
};

/// Returns the parameters. Throws StateError inside the model's forward or backward.
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
typename Types::Options& group_options(torch::optim::Optimizer& optimizer, size_t group) {
  return static_cast<typename Types::Options&>(optimizer.param_groups()[group].options());
}

at::Tensor new_like(const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  return at::zeros_like(param.detach());
}

/// Returns whether to keep the optimizer's tensor. After torch::load, it is plain even if the parameter is sharded.
bool has_matching_layout(const at::Tensor& field, const at::Tensor& param) {
  return field.defined() && (is_dtensor(field) || !is_dtensor(param));
}

/// Resets the state of a parameter to that before the first step.
template <class Types>
void reset_state(torch::optim::Optimizer& optimizer, const NamedParam& param) {
  optimizer.state().erase(param.tensor.unsafeGetTensorImpl());
  if (auto state = initial_state<Types>(param.tensor, group_options<Types>(optimizer, param.group))) {
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

/// Converts a value of the state dict to a field of this type.
template <class Field>
void assign(Field& field, const std::string& key, const StateValue& value) {
  using Stored = std::conditional_t<std::is_same_v<Field, double>, double, int64_t>;
  const auto* stored = std::get_if<Stored>(&value);
  TESSERA_CHECK(ValueError, stored != nullptr, "set_optimizer_state_dict: '{}' is {}, and must be {}", key,
                type_name(value), std::is_same_v<Stored, double> ? "a double" : "an int64_t");
  field = static_cast<Field>(*stored);
}

/// One call of set_optimizer_state_dict for one optimizer type. Checks everything before it changes anything.
template <class Types>
class Setter {
 public:
  /// `received`: whether only rank 0 has the tensors of `given`.
  Setter(torch::optim::Optimizer& optimizer, const std::vector<NamedParam>& params, const StateDict& given,
         bool received, const StateDictOptions& options)
      : optimizer_(optimizer), params_(params), given_(given), received_(received), options_(options) {}

  void check() {
    TESSERA_CHECK(
        KeyError, !takes_away() || params_.empty() || !given_.empty(),
        "set_optimizer_state_dict: the dict is empty, which would take away all state. With full_state_dict "
        "and cpu_offload rank 0 alone has it: set it with broadcast_from_rank0. A checkpoint of a model alone "
        "has none: leave this call out");
    for (const auto& param : params_) {
      typename Types::State unused;
      visit_fields(unused, [&](const char* name, auto& field) {
        const auto key = state_key(param, name);
        const auto* value = find(key);
        state_.push_back(value);
        if (value) {
          check_field(field, key, *value, param.tensor);
        }
      });
      check_options(param);
    }
    for (const auto& [key, value] : given_) {
      TESSERA_CHECK(
          KeyError, !options_.strict || used_.count(&value) == 1,
          "set_optimizer_state_dict: '{}' belongs to no parameter of the optimizer, or is not a field of this "
          "type of optimizer",
          key);
    }
  }

  void set(const RankSync& ranks) {
    for (size_t group = 0; group < optimizer_.param_groups().size(); ++group) {
      visit_fields(group_options<Types>(optimizer_, group), [&](const char* name, auto& field) {
        if (const auto found = group_options_.find({group, name}); found != group_options_.end()) {
          assign(field, name, *found->second);
        }
      });
    }
    auto value = state_.begin();
    for (const auto& param : params_) {
      const auto end = value + std::ssize(state_) / std::ssize(params_);
      if (std::any_of(value, end, [](const StateValue* found) { return found != nullptr; })) {
        visit_fields(make_state<Types>(optimizer_, param),
                     [&](const char* name, auto& field) { set_field(field, name, *value++, param.tensor); });
      } else if (takes_away()) {
        reset_state<Types>(optimizer_, param);
      }
      value = end;
    }
    transfer(transfers_, ranks, options_);
  }

 private:
  /// Returns whether to remove state that the dict lacks. A frozen parameter that is left out may still have state.
  bool takes_away() const { return options_.strict && !options_.ignore_frozen_params; }

  const StateValue* find(const std::string& key) {
    const auto found = given_.find(key);
    if (found == given_.end()) {
      return nullptr;
    }
    used_.insert(&found->second);
    return &found->second;
  }

  template <class Field>
  void check_field(Field& field, const std::string& key, const StateValue& value, const at::Tensor& param) {
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      const auto* tensor = std::get_if<at::Tensor>(&value);
      TESSERA_CHECK(ValueError, tensor != nullptr, "set_optimizer_state_dict: '{}' is no tensor", key);
      if (!received_) {
        check_readable(key, *tensor);
      }
      check_fits(key, *tensor, param, options_);
    } else {
      assign(field, key, value);
    }
  }

  void check_options(const NamedParam& param) {
    typename Types::Options own(0.0);
    visit_fields(own, [&](const char* name, auto& field) {
      const auto key = option_key(param, name);
      if (const auto* value = find(key)) {
        assign(field, key, *value);
        const auto place = group_options_.try_emplace({param.group, name}, value).first;
        auto of_others = field;
        assign(of_others, key, *place->second);
        TESSERA_CHECK(ValueError, place->second == value || of_others == field,
                      "set_optimizer_state_dict: '{}' is {}, but other parameters of the optimizer's group {} have {}; "
                      "give parameters that need other options a group of their own",
                      key, static_cast<double>(field), param.group, static_cast<double>(of_others));
      }
    });
  }

  template <class Field>
  void set_field(Field& field, const char* name, const StateValue* value, const at::Tensor& param) {
    if (!value) {
      if (takes_away()) {
        field = Field();
      }
      return;
    }
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      if (!has_matching_layout(field, param)) {
        field = new_like(param);
      }
      // A handle to the field itself needs no copy, unless rank 0 sends, because all ranks must take part in that.
      const auto& given = std::get<at::Tensor>(*value);
      if (options_.broadcast_from_rank0 || !given.is_same(field)) {
        transfers_.push_back({.given = given, .target = field});
      }
    } else {
      assign(field, name, *value);
    }
  }

  torch::optim::Optimizer& optimizer_;
  const std::vector<NamedParam>& params_;
  const StateDict& given_;
  const bool received_;
  const StateDictOptions& options_;
  std::unordered_set<const StateValue*> used_;
  std::vector<const StateValue*> state_;  // per parameter, one per field, or null
  std::map<std::pair<size_t, std::string_view>, const StateValue*> group_options_;
  std::vector<Transfer> transfers_;
};

/// Returns the checkpoint's entries for the optimizer's parameters: the optimizer's own tensors, or new ones.
StateDict state_to_load(CheckpointIndex index, torch::nn::Module& model, torch::optim::Optimizer& optimizer) {
  const auto& tensors = index.tensors[Section::Optimizer];
  const auto& values = index.values[Section::Optimizer];
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
          own[key] = has_matching_layout(field, param.tensor) ? field : new_like(param.tensor);
        }
      });
      visit_fields(group_options<Types>(optimizer, param.group), [&](const char* name, auto& field) {
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
      visit_fields(group_options<Types>(optimizer, param.group),
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
    with_types(optimizer, kWhere, [](auto) {});  // throws for an unknown type
  });
  const auto received = receive(state, ranks, options);
  with_types(optimizer, kWhere, [&]<class Types>(Types) {
    Setter<Types> setter(optimizer, params, received ? *received : state, received.has_value(), options);
    ranks.on_all_ranks([&] { setter.check(); });
    setter.set(ranks);
  });
}

StateDict optimizer_state_to_load(const std::string& path, ModuleRef model, torch::optim::Optimizer& optimizer) {
  StateDict own;
  RankSync::all().on_all_ranks([&] { own = state_to_load(open_checkpoint(path), *model, optimizer); });
  return own;
}

}  // namespace tessera::dcp
