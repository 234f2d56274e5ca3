#pragma once
// Types of state dicts of FullyShardedDataParallel models, set per tree of units.
//
//   FULL     full plain tensors, which load into a model that is not wrapped
//   SHARDED  DTensors: this rank's rows and their layout
//   LOCAL    this rank's rows, flat and without padding; not available with a given mesh
//
// NO_SHARD units are saved as FULL. Buffers have their original dtype. SHARDED and LOCAL entries are the parameters'
// own memory unless offload_to_cpu copies them from a GPU; other entries, and optimizer states, are copies.
// Source: torch/distributed/fsdp/api.py and _state_dict_utils.py.

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <optional>
#include <string>
#include <variant>

namespace tessera {

enum class StateDictType { FULL_STATE_DICT, LOCAL_STATE_DICT, SHARDED_STATE_DICT };
std::string_view to_string(StateDictType type);

struct FullStateDictConfig {
  bool offload_to_cpu = false;
  bool rank0_only = false;  // other ranks than the mesh's first get an empty dict
  bool operator==(const FullStateDictConfig&) const = default;
};
struct LocalStateDictConfig {
  bool offload_to_cpu = false;
  bool operator==(const LocalStateDictConfig&) const = default;
};
struct ShardedStateDictConfig {
  bool offload_to_cpu = false;
  bool operator==(const ShardedStateDictConfig&) const = default;
};
using StateDictConfig = std::variant<FullStateDictConfig, LocalStateDictConfig, ShardedStateDictConfig>;

struct FullOptimStateDictConfig {
  bool offload_to_cpu = true;
  bool rank0_only = false;
  bool operator==(const FullOptimStateDictConfig&) const = default;
};
struct LocalOptimStateDictConfig {
  bool offload_to_cpu = false;
  bool operator==(const LocalOptimStateDictConfig&) const = default;
};
struct ShardedOptimStateDictConfig {
  bool offload_to_cpu = true;
  bool operator==(const ShardedOptimStateDictConfig&) const = default;
};
using OptimStateDictConfig =
    std::variant<FullOptimStateDictConfig, LocalOptimStateDictConfig, ShardedOptimStateDictConfig>;

struct StateDictSettings {
  StateDictType type = StateDictType::FULL_STATE_DICT;
  StateDictConfig state_dict_config = FullStateDictConfig{};
  OptimStateDictConfig optim_state_dict_config = FullOptimStateDictConfig{};
  bool operator==(const StateDictSettings&) const = default;

  /// Makes settings with default configs for `type`. Throws StateError for a config of another type.
  static StateDictSettings make(StateDictType type, std::optional<StateDictConfig> state_dict_config = std::nullopt,
                                std::optional<OptimStateDictConfig> optim_state_dict_config = std::nullopt);
};

using FSDPStateDict = torch::OrderedDict<std::string, at::Tensor>;

}  // namespace tessera
