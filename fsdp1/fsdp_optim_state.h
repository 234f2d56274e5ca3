#pragma once
// Saves and loads optimizer state of FullyShardedDataParallel models by parameter name, for any number of ranks.
//
//   const auto saved = optim_state_dict(*model, optimizer);  // in the type that FSDP::set_state_dict_type has set
//   optim_state_dict_to_load(*model, optimizer, saved, {.load_directly = true});
//
// All ranks must call it. Supported optimizers: optim/optimizer_fields.h. Thread safety: one thread per rank.
// Source: torch/distributed/fsdp/fully_sharded_data_parallel.py.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

enum class OptimStateKeyType {
  PARAM_NAME,  // "blocks.0.weight"
  PARAM_ID,    // index among the optimizer's parameters, over all groups
};

struct OptimStateDict {
  using Key = std::variant<std::string, int64_t>;
  struct Group {
    std::vector<Key> params;
    std::map<std::string, double> options;  // "lr", "beta1", ...; a bool is 0 or 1
    bool operator==(const Group&) const = default;
  };
  /// Tensors such as "exp_avg" of each parameter that was stepped; "step" is a scalar.
  std::map<Key, std::map<std::string, at::Tensor>> state;
  std::vector<Group> param_groups;
};

struct OptimStateDictOptions {
  /// Dict to save in place of the optimizer's own state (null), by names or ids. Read only during the call.
  const OptimStateDict* optim_state_dict = nullptr;
  /// Group whose first rank keeps the dict if rank0_only is set. Null: the ranks of the units' mesh.
  const ProcessGroupPtr* group = nullptr;  // its first rank has the dict if rank0_only is set
};

/// Returns the optimizer's state by name; empty on other ranks if rank0_only is set. Throws NotImplementedError for an
/// unknown optimizer or LOCAL_STATE_DICT, KeyError for unknown parameters, and ValueError if a given dict has other
/// groups.
OptimStateDict optim_state_dict(torch::nn::Module& model, torch::optim::Optimizer& optim,
                                const OptimStateDictOptions& options = {});

struct OptimStateDictToLoadOptions {
  bool is_named_optimizer = false;  // return names instead of ids
  bool load_directly = false;       // also set the optimizer's state and group options
  const ProcessGroupPtr* group = nullptr;
};

/// Returns `dict` in the form of this model's optimizer, where states of sharded parameters are DTensors. `dict` is
/// equal on all ranks, or given on the first if rank0_only is set. Reshards units. Throws KeyError for an unknown name,
/// ValueError for other groups or sizes, and StateError inside forward or backward.
OptimStateDict optim_state_dict_to_load(torch::nn::Module& model, torch::optim::Optimizer& optim,
                                        const OptimStateDict& dict, OptimStateDictToLoadOptions options = {});

/// Returns the dict with keys of `key_type`, without names that the optimizer lacks, sharing tensors. Throws ValueError
/// for mixed key types, and KeyError for an unknown id or a parameter without a name. Does not communicate.
OptimStateDict rekey_optim_state_dict(const OptimStateDict& dict, OptimStateKeyType key_type,
                                      const torch::nn::Module& model, const torch::optim::Optimizer& optim);

}  // namespace tessera
