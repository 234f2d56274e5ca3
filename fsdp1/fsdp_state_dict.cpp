#include "fsdp1/fsdp_state_dict.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/cast.h"
#include "base/error.h"
#include "device_mesh/rank_agreement.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/local/gather_full.h"
#include "fsdp1/fsdp.h"
#include "fsdp1/wrapper_state.h"
#include "fully_shard/engine/unit_tree.h"

namespace tessera {

namespace {

using torch::nn::Module;

constexpr const char* kConfigNames[] = {"FullStateDictConfig", "LocalStateDictConfig", "ShardedStateDictConfig"};
constexpr const char* kOptimConfigNames[] = {"FullOptimStateDictConfig", "LocalOptimStateDictConfig",
                                             "ShardedOptimStateDictConfig"};

std::string describe_settings(const StateDictSettings& settings) {
  return fmt::format("{} with {} and {}", to_string(settings.type), kConfigNames[settings.state_dict_config.index()],
                     kOptimConfigNames[settings.optim_state_dict_config.index()]);
}

/// Returns the unit of each parameter.
std::unordered_map<c10::TensorImpl*, const WrapperState*> owners(const std::vector<NamedUnit>& units) {
  std::unordered_map<c10::TensorImpl*, const WrapperState*> owners;
  for (const auto& [path, module, unit] : units) {
    if (const auto& group = unit->state->group()) {
      for (const auto& param : group->params()) {
        owners.emplace(param.param().unsafeGetTensorImpl(), unit.get());
      }
    }
  }
  return owners;
}

/// Returns parameters held as shards by fully_shard units that were made below FullyShardedDataParallel units.
std::unordered_set<c10::TensorImpl*> shards_of_other_units(Module& module, const std::vector<NamedUnit>& units) {
  auto others = fsdp_states(module);
  std::erase_if(others, [&](const NamedState& state) {
    return std::ranges::any_of(units, [&](const NamedUnit& named) { return named.unit->state == state.state; });
  });
  std::unordered_set<c10::TensorImpl*> shards;
  for (const auto& [path, state] : with_shards(std::move(others))) {
    for (const auto& param : state->group()->params()) {
      shards.insert(param.param().unsafeGetTensorImpl());
    }
  }
  return shards;
}

bool offloads(const StateDictSettings& settings) {
  return std::visit([](const auto& config) { return config.offload_to_cpu; }, settings.state_dict_config);
}

at::Tensor full_entry(const at::Tensor& tensor, const StateDictSettings& settings, bool keeps) {
  const auto* meta = dtensor_meta(tensor);
  const auto full = meta ? gather_full(*meta) : tensor;
  if (!keeps) {
    return {};
  }
  return offloads(settings) && !full.is_cpu() ? full.cpu() : full.clone();
}

at::Tensor sharded_entry(const at::Tensor& tensor, const StateDictSettings& settings) {
  const auto* meta = dtensor_meta(tensor);
  const auto own = settings.type == StateDictType::LOCAL_STATE_DICT ? meta->local.reshape({-1}) : tensor.detach();
  return offloads(settings) ? on_device(own, at::kCPU) : own;
}

/// Returns a copy.
at::Tensor buffer_entry(const at::Tensor& buffer, at::ScalarType dtype, const StateDictSettings& settings) {
  const auto device = offloads(settings) ? at::Device(at::kCPU) : buffer.device();
  return buffer.to(device, dtype, /*non_blocking=*/false, /*copy=*/true);
}

void check_local(Module& root, const std::vector<NamedUnit>& units) {
  for (const auto& [path, state] : fsdp_states(root)) {
    const auto is_own = [&own = state](const NamedUnit& named) { return named.unit->state == own; };
    TESSERA_CHECK(StateError, std::ranges::any_of(units, is_own),
                  "state_dict: '{}' is a unit of fully_shard or replicate, for which LOCAL_STATE_DICT is not defined; "
                  "use SHARDED_STATE_DICT",
                  path);
  }
  for (const auto& [path, module, unit] : units) {
    TESSERA_CHECK(StateError, !unit->mesh_was_given,
                  "state_dict: {} was wrapped over a mesh, for which LOCAL_STATE_DICT is not defined; use "
                  "SHARDED_STATE_DICT",
                  unit->state->label());
  }
}

/// Returns the dtypes of buffers in state dicts, which are those of the plain model.
std::unordered_map<c10::TensorImpl*, at::ScalarType> buffer_dtypes(const std::vector<NamedUnit>& units) {
  std::unordered_map<c10::TensorImpl*, at::ScalarType> dtypes;
  for (const auto& [path, module, unit] : units) {
    for (const auto& cast : unit->cast_buffers) {
      dtypes.emplace(cast.buffer.unsafeGetTensorImpl(), cast.original);
    }
  }
  return dtypes;
}

/// Returns whether the entry is this rank's rows of `own`, flattened.
bool is_local_entry(const DTensorMeta& own, const at::Tensor& value) {
  return !is_dtensor(value) && value.dim() == 1 && value.numel() == own.local.numel() &&
         value.sizes() != own.spec->sizes();
}

void check_entry(const std::string& name, const at::Tensor& own, const at::Tensor& value) {
  TESSERA_CHECK(ValueError, may_cast(value.scalar_type(), own.scalar_type()),
                "load_state_dict: '{}' is {}, the module has {}; only floating dtypes are cast", name,
                c10::toString(value.scalar_type()), c10::toString(own.scalar_type()));
  const auto* meta = dtensor_meta(own);
  TESSERA_CHECK(ValueError, value.sizes() == own.sizes() || (meta && is_local_entry(*meta, value)),
                "load_state_dict: '{}' is {}; the module has {}{}", name, value.sizes(), own.sizes(),
                meta ? fmt::format(", {} elements on this rank", meta->local.numel()) : "");
}

/// Loads an entry that passed check_entry.
void load_entry(at::Tensor own, const at::Tensor& value) {
  const auto* meta = dtensor_meta(own);
  if (!meta || is_dtensor(value)) {
    own.copy_(meta ? on_device(value, meta->local.device()) : value);
    return;
  }
  meta->local.copy_(is_local_entry(*meta, value) ? value.view(meta->local.sizes())
                                                 : local_shard_of(value, *meta->spec));
}

using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

/// Throws unless each of the module's tensors has a matching entry, and there are no others.
void check_entries(const NamedTensors& own, const FSDPStateDict& state) {
  std::vector<std::string> wrong;
  for (const auto& item : own) {
    if (!state.contains(item.key())) {
      wrong.push_back("missing " + item.key());
    }
  }
  for (const auto& item : state) {
    if (!own.contains(item.key())) {
      wrong.push_back("unknown " + item.key());
    }
  }
  TESSERA_CHECK(KeyError, wrong.empty(), "load_state_dict: {}", fmt::join(wrong, ", "));
  for (const auto& item : own) {
    check_entry(item.key(), item.value(), state[item.key()]);
  }
}

}  // namespace

std::string_view to_string(StateDictType type) {
  constexpr std::string_view names[] = {"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"};
  return names[static_cast<size_t>(type)];
}

StateDictSettings StateDictSettings::make(StateDictType type, std::optional<StateDictConfig> state_dict_config,
                                          std::optional<OptimStateDictConfig> optim_state_dict_config) {
  const StateDictConfig defaults[] = {FullStateDictConfig{}, LocalStateDictConfig{}, ShardedStateDictConfig{}};
  const OptimStateDictConfig optim_defaults[] = {FullOptimStateDictConfig{}, LocalOptimStateDictConfig{},
                                                 ShardedOptimStateDictConfig{}};
  const auto index = static_cast<size_t>(type);
  StateDictSettings settings{type, state_dict_config.value_or(defaults[index]),
                             optim_state_dict_config.value_or(optim_defaults[index])};
  TESSERA_CHECK(StateError, settings.state_dict_config.index() == index,
                "StateDictSettings: {} takes a {}, but a {} is given", to_string(type), kConfigNames[index],
                kConfigNames[settings.state_dict_config.index()]);
  TESSERA_CHECK(StateError, settings.optim_state_dict_config.index() == index,
                "StateDictSettings: {} takes a {}, but a {} is given", to_string(type), kOptimConfigNames[index],
                kOptimConfigNames[settings.optim_state_dict_config.index()]);
  return settings;
}

std::optional<StateDictSettings> FSDP::get_state_dict_type(Module& module) {
  const auto units = fsdp_units(module);
  for (const auto& [path, below, unit] : units) {
    TESSERA_CHECK(StateError, unit->state_dict_settings == units[0].unit->state_dict_settings,
                  "get_state_dict_type: the units differ: '{}' has {}, '{}' has {}", units[0].path,
                  describe_settings(units[0].unit->state_dict_settings), path,
                  describe_settings(unit->state_dict_settings));
  }
  return units.empty() ? std::nullopt : std::optional(units[0].unit->state_dict_settings);
}

std::optional<StateDictSettings> FSDP::set_state_dict_type(Module& module, const StateDictSettings& settings) {
  const auto checked =
      StateDictSettings::make(settings.type, settings.state_dict_config, settings.optim_state_dict_config);
  const auto before = get_state_dict_type(module);
  for (const auto& [path, below, unit] : fsdp_units(module)) {
    unit->state_dict_settings = checked;
  }
  return before;
}

void FSDP::state_dict_type(Module& module, const StateDictSettings& settings, const std::function<void()>& body) {
  const auto before = set_state_dict_type(module, settings);
  const auto restore = [&] {
    for (const auto& [path, below, unit] : fsdp_units(module)) {
      unit->state_dict_settings = *before;
    }
  };
  try {
    body();
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

FSDPStateDict FSDP::state_dict(Module& module) {
  const at::NoGradGuard no_grad;
  const auto settings = get_state_dict_type(module).value_or(StateDictSettings());
  const bool is_full = settings.type == StateDictType::FULL_STATE_DICT;
  if (is_full) {
    reshard_on_all_ranks(module, "state_dict");
  } else {
    reshard_all(module);
  }
  const auto units = fsdp_units(module);
  if (settings.type == StateDictType::LOCAL_STATE_DICT) {
    check_local(module, units);
  }
  const bool keeps =
      !is_full || !std::get<FullStateDictConfig>(settings.state_dict_config).rank0_only || is_first_rank(units);
  const auto owner = owners(units);
  const auto other_shards = shards_of_other_units(module, units);
  FSDPStateDict state;
  for (const auto& item : module.named_parameters()) {
    const auto own = owner.find(item.value().unsafeGetTensorImpl());
    const bool is_shard = (own != owner.end() && own->second->strategy != ShardingStrategy::NO_SHARD) ||
                          other_shards.contains(item.value().unsafeGetTensorImpl());
    const bool shards = is_shard && is_dtensor(item.value());  // not inside summon_full_params
    const auto entry =
        is_full || !shards ? full_entry(item.value().detach(), settings, keeps) : sharded_entry(item.value(), settings);
    if (keeps) {
      state.insert(item.key(), entry);
    }
  }
  const auto dtypes = buffer_dtypes(units);
  for (const auto& item : module.named_buffers()) {
    if (keeps) {
      const auto dtype = dtypes.find(item.value().unsafeGetTensorImpl());
      state.insert(
          item.key(),
          buffer_entry(item.value(), dtype == dtypes.end() ? item.value().scalar_type() : dtype->second, settings));
    }
  }
  return state;
}

void FSDP::load_state_dict(Module& module, const FSDPStateDict& state) {
  const at::NoGradGuard no_grad;
  torch::OrderedDict<std::string, at::Tensor> own;
  const auto check = [&] {
    reshard_all(module);
    own = module.named_parameters();
    for (const auto& item : module.named_buffers()) {
      own.insert(item.key(), item.value());
    }
    check_entries(own, state);
    return std::vector<std::string>();
  };
  auto meshes = collect_meshes(fsdp_states(module));
  for (const auto& [path, below, unit] : fsdp_units(module)) {
    if (std::ranges::find(meshes, unit->mesh) == meshes.end()) {
      meshes.push_back(unit->mesh);  // for a unit without parameters
    }
  }
  check_ranks_agree(meshes, "load_state_dict", check);
  for (auto& item : own) {
    load_entry(item.value(), state[item.key()]);
  }
}

}  // namespace tessera
