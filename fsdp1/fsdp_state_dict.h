#pragma once
// State dicts of models that FullyShardedDataParallel wrapped: which form they take, per tree of units.
//
//   FULL     full, plain tensors under the plain model's names: loads into a model that is not wrapped
//   SHARDED  DTensors: this rank's rows and where they belong
//   LOCAL    this rank's rows, flat and without padding; refused where a mesh was given
//
// Units with NO_SHARD are saved as FULL in each. Buffers are in the dtype that the plain model has. SHARDED and LOCAL
// entries are the parameters' own memory, unless offload_to_cpu takes them from a GPU; all else is a copy. Optimizer
// states are copies in each form.
// Names and meaning follow torch/distributed/fsdp/api.py and _state_dict_utils.py.

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
  bool rank0_only = false;  // ranks but the first of the mesh get an empty dict
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

  /// With the type's default configs where none are given. Throws StateError for a config of another type, naming
  /// what is expected and what was given.
  static StateDictSettings make(StateDictType type, std::optional<StateDictConfig> state_dict_config = std::nullopt,
                                std::optional<OptimStateDictConfig> optim_state_dict_config = std::nullopt);
};

using FSDPStateDict = torch::OrderedDict<std::string, at::Tensor>;

}  // namespace tessera
